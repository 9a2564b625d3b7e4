"""Checks of the operators that run whole decode steps: their logits beside those of a decoder in plain torch.

On CUDA each step is a replay of the recorded graph. The reference rounds as the operators do, one position after the
other: numbers that are rounded are float32, sums float64, so that their order plays no part.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.decode.calls import ACTIVATIONS, ProgramDecoder, mixed, split_heads, turned
from optigpu.ops.decode.cpu.cache import KEY_BLOCK
from optigpu.ops.decode.cpu.decoder import CpuDecoder, best_instruction_set
from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.ops.decode.cuda.decoder import CudaDecoder
from optigpu.ops.decode.cuda.packing import pack_for_cuda
from optigpu.ops.decode.program import (
    WEIGHT_KINDS,
    Block,
    CacheKind,
    Expert,
    HeadNorm,
    Matrix,
    Mixture,
    Mlp,
    Norm,
    Program,
    Sampling,
    WeightKind,
    block_matrices,
)
from optigpu.ops.kernel_check import Draw, KernelCheck
from optigpu.ops.operands import INT4_LARGEST, INT4_LEAST, INT8_LARGEST
from optigpu.vocabulary import DeviceKind, ReplicateError, UnsupportedError


class ReferenceDecoder:
    """What CpuDecoder and CudaDecoder do, for programs whose matrices packing.py has packed.

    `exact` leaves out what rounds activations, keys and values: what is left is the transformers model with the weights
    that the packed ones stand for.
    """

    def __init__(self, program: Program, kv: CacheKind = "bf16", exact: bool = False) -> None:
        self._program = program
        self._kv = kv
        self._exact = exact
        self._weights = {id(matrix): unpack(matrix).double() for matrix in _matrices(program)}
        self._capacity = 0
        self._sequences = 0
        self.length = 0
        self.logits = torch.empty(0)

    def begin(self, sequences: int, capacity: int) -> None:
        """An empty cache for so many sequences of at most so many tokens."""
        program = self._program
        shape = (len(program.blocks), 2, sequences, capacity, program.kv_heads, program.head_size)
        self._cache = torch.zeros(shape, dtype=torch.float64)
        self._steps = torch.zeros(*shape[:-1], 1)
        self._tables = [rotary(capacity) for rotary in program.rotaries]
        self._capacity, self._sequences, self.length = capacity, sequences, 0

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits float32 [sequences, vocabulary] after the last of the tokens, int64 [sequences, count]."""
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[0] != self._sequences:
            raise ValueError(f"extend needs int64 [{self._sequences}, count].")
        if tokens.shape[1] == 0 or not 0 <= int(tokens.min()) <= int(tokens.max()) < self._program.vocabulary:
            raise ValueError("extend needs tokens of the vocabulary.")
        for token in tokens.unbind(1):
            self.logits = self._step(token)
        return self.logits

    def decode(self, tokens: torch.Tensor, steps: int, sampling: Sampling | None = None) -> torch.Tensor:
        """The most likely tokens int64 [sequences, steps] that follow the last ones, [sequences, 1]."""
        if sampling is not None and sampling.temperature:
            raise ValueError("The reference takes the most likely token.")
        found = []
        for _ in range(steps):
            tokens = self.extend(tokens).argmax(dim=1, keepdim=True)
            found.append(tokens)
        return torch.cat(found, dim=1)

    def _step(self, token: torch.Tensor) -> torch.Tensor:
        program = self._program
        if self.length >= min(self._capacity, program.context):
            raise ReplicateError(f"Position {self.length} is out of range.")
        x = self._weights[id(program.embedding)][token] * program.embedding_scale
        if program.positions is not None:
            x = x + self._weights[id(program.positions)][self.length]
        x = x.float()
        for index, block in enumerate(program.blocks):
            x = self._block(x, index, block)
        self.length += 1
        return capped(self._linear(norm_of(x, program.final), program.head), program.logit_cap)

    def _block(self, x: torch.Tensor, index: int, block: Block) -> torch.Tensor:
        scale, before = self._program.residual_scale, x
        attended = self._linear(self._attention(norm_of(x, block.first), index, block), block.output)
        x = x + scale * norm_of(attended, block.after_attention)
        h = norm_of(before if self._program.parallel else x, block.second)
        return x + scale * norm_of(self._mlp(h, block.mlp), block.after_mlp)

    def _mlp(self, h: torch.Tensor, mlp: Mlp | Mixture) -> torch.Tensor:
        if isinstance(mlp, Mixture):
            routed = self._linear(h, mlp.router).double()
            return mixed(h, routed, mlp, self._linear, self._program.activation)
        activation, up = ACTIVATIONS[self._program.activation], self._linear(h, mlp.up)
        inner = activation(up) if mlp.gate is None else activation(self._linear(h, mlp.gate)) * up
        return self._linear(inner, mlp.down)

    def _attention(self, x: torch.Tensor, index: int, block: Block) -> torch.Tensor:
        program, position = self._program, self.length
        found = torch.cat([self._linear(x, matrix) for matrix in block.qkv], dim=1)
        query, key, value = split_heads(found.view(self._sequences, -1, program.head_size), program)
        query = self._turned(normed_heads(query, block.query_norm), block)
        key = self._turned(normed_heads(key, block.key_norm), block)
        cache = self._cache[index]
        if self._kv == "int4" and not self._exact:
            return self._attended_fours(query, key, value, index, block)
        cache[0, :, position] = self._kept(key)
        cache[1, :, position] = self._kept(value)
        first = 0 if block.window is None else max(0, position + 1 - block.window)
        group = program.heads // program.kv_heads
        keys, values = cache[:, :, first : position + 1].repeat_interleave(group, dim=3)
        scores = torch.einsum("shd,sthd->sht", query.double(), keys) * block.scale
        return torch.einsum("sht,sthd->shd", self._weights_of(scores, block), values).float().flatten(1)

    def _weights_of(self, scores: torch.Tensor, block: Block) -> torch.Tensor:
        """The softmax over the last dimension of [sequences, heads, tokens]."""
        scores = capped(scores, self._program.score_cap)
        if block.sinks is None:
            return scores.softmax(dim=2)
        sinks = block.sinks.double().expand(self._sequences, -1).unsqueeze(2)
        return torch.cat([scores, sinks], dim=2).softmax(dim=2)[:, :, :-1]

    def _attended_fours(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: int, block: Block
    ) -> torch.Tensor:
        """By products of integers: a query in 8 bits, and the weights of each 16 tokens, times their values' scales."""
        program, position = self._program, self.length
        for which, heads in enumerate((key, value)):
            numbers, step = self._four_bits(rotated(heads))
            self._cache[index, which, :, position] = numbers.double()
            self._steps[index, which, :, position] = step
        first = 0 if block.window is None else max(0, position + 1 - block.window)
        begin, group = first // KEY_BLOCK * KEY_BLOCK, program.heads // program.kv_heads
        near = slice(begin, position + 1)
        keys, values = self._cache[index, :, :, near].repeat_interleave(group, dim=3)
        key_steps, value_steps = self._steps[index, :, :, near].repeat_interleave(group, dim=3).squeeze(4)
        numbers, step = self._eight_bits(rotated(query))
        scores = torch.einsum("shd,sthd->sht", numbers.double(), keys) * key_steps.transpose(1, 2) * step
        weights = torch.zeros_like(scores, dtype=torch.float32)
        weights[:, :, first - begin :] = self._weights_of(scores[:, :, first - begin :] * block.scale, block)
        weights = weights * value_steps.transpose(1, 2)
        found = torch.zeros_like(query, dtype=torch.float64)
        for part, some in zip(weights.split(KEY_BLOCK, dim=2), values.split(KEY_BLOCK, dim=1), strict=True):
            numbers, step = self._eight_bits(part)
            found += torch.einsum("sht,sthd->shd", numbers.double(), some) * step
        return rotated(found.float()).flatten(1)

    def _eight_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return eight_bits(x)

    def _four_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return four_bits(x)

    def _turned(self, heads: torch.Tensor, block: Block) -> torch.Tensor:
        """Rotary embeddings of [sequences, heads, head_size] at the present position."""
        if block.rotary is None:
            return heads
        cosines, sines = (table[self.length] for table in self._tables[block.rotary])
        return turned(cosines, sines, heads, neighbours=self._program.neighbours)

    def _kept(self, heads: torch.Tensor) -> torch.Tensor:
        """What the cache has of [sequences, heads, head_size]."""
        if self._exact:
            return heads.double()
        if self._kv == "bf16":
            return heads.to(torch.bfloat16).double()
        numbers, step = eight_bits(heads)
        return (numbers.float() * step).double()

    def _linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        weights = self._weights[id(matrix)]
        if self._exact or matrix.kind == "bf16":
            y = x.double() @ weights.T
        else:
            # A group's products are integers times its scales; float64 holds their sums exactly.
            numbers, step = eight_bits(x.unflatten(1, (-1, matrix.group)))
            y = (numbers.double() * step.double()).flatten(1) @ weights.T
        return (y if matrix.bias is None else y + matrix.bias[: matrix.outputs]).float()


def eight_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -127 to 127 and steps [..., 1], float32, of float32 [..., size]."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    numbers = torch.where(largest == 0, 0.0, x * (INT8_LARGEST / largest))
    return numbers.round(), largest / INT8_LARGEST


def four_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -8 to 7 and steps [..., 1], float32; the largest in magnitude becomes -8, whatever its sign."""
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    numbers = torch.where(largest == 0, 0.0, x * (INT4_LEAST / largest))
    return numbers.round().clamp(INT4_LEAST, INT4_LARGEST), largest / INT4_LEAST


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform, which is its own inverse, of each of as many numbers as the largest power of two that
    divides the last dimension."""
    size = x.shape[-1]
    count, apart = size & -size, 1
    while apart < count:
        first, second = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        apart *= 2
    return x / math.sqrt(count)


def normed_heads(heads: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
    """[sequences, heads, head_size] normed."""
    return heads if norm is None else norm_of(heads.flatten(1), norm.norm, norm.together).view_as(heads)


def capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * (x.double() / cap).tanh().to(x.dtype)


def norm_of(x: torch.Tensor, norm: Norm | None, together: int | None = None) -> torch.Tensor:
    """Of all of the last dimension, or of as many numbers at a time."""
    if norm is None:
        return x
    parts = x.double().unflatten(-1, (-1, together or x.shape[-1]))
    if norm.kind == "layer":
        parts = parts - parts.mean(dim=-1, keepdim=True)
    parts = parts * (parts.square().mean(dim=-1, keepdim=True) + norm.epsilon).rsqrt()
    y: torch.Tensor = parts.flatten(-2) * norm.weight
    return (y if norm.bias is None else y + norm.bias).float()


def _matrices(program: Program) -> list[Matrix]:
    found = [program.head, program.embedding]
    found += [program.positions] if program.positions else []
    for block in program.blocks:
        found += block_matrices(block)
    return found


SEQUENCES, TOKENS, CAPACITY, DECODED = 2, 12, 24, 6
VOCABULARY, CONTEXT, GROUP = 203, 64, 32
STEP_BOUND, PROMPT_BOUND = 3e-2, 5e-2
"""Of the largest logit. A number that lies between two steps of int8 may be rounded to either; a prompt on CUDA is
multiplied in bfloat16."""

CPU = torch.device("cpu")

Packing = Callable[[torch.Tensor, torch.Tensor | None, WeightKind, int], Matrix]


@dataclass(frozen=True)
class Shape:
    """Of a decoder. A `gated` one has RMSNorm, rotary embeddings, a gate, three matrices for the attention and an
    embedding of its own; a `mixed` one experts and more norms, a cap and sinks as well."""

    gated: bool
    heads: int
    kv_heads: int
    width: int = 128
    head_size: int = 32
    inner: int = 256
    blocks: int = 2
    mixed: bool = False

    @property
    def qkv(self) -> tuple[int, ...]:
        """The outputs of the matrices of queries, keys and values."""
        shared = self.kv_heads * self.head_size
        outputs = (self.heads * self.head_size, shared, shared)
        return outputs if self.gated else (sum(outputs),)


LIKE_GPT2 = Shape(gated=False, heads=4, kv_heads=4)
LIKE_LLAMA = Shape(gated=True, heads=4, kv_heads=2)
MIXED = Shape(gated=True, heads=4, kv_heads=2, mixed=True)
CASES: tuple[tuple[Shape, CacheKind], ...] = ((LIKE_LLAMA, "bf16"), (LIKE_GPT2, "int8"), (MIXED, "bf16"))


def steps(kind: WeightKind, device: DeviceKind) -> Comparison:
    """Given tokens one after the other, and then greedy ones, with weights of that kind."""
    backend = _backend(device)
    errors: list[float] = []
    for shape, kv in CASES:
        reference, decoder = _decoders(shape, kind, kv, device)
        tokens = _tokens(shape)
        pairs = ((decoder.extend(token), reference.extend(token)) for token in tokens.split(1, dim=1))
        errors += [_error(found, expected) for found, expected in pairs]
        last = tokens[:, -1:]
        chosen = decoder.decode(last, DECODED).cpu()
        reference.extend(torch.cat([last, chosen[:, :-1]], dim=1))
        errors.append(_error(decoder.logits, reference.logits))
        if not torch.equal(decoder.logits.argmax(dim=1).cpu(), chosen[:, -1]):
            raise ReplicateError("The chosen token is not the one with the largest logit.")
    return Comparison(float(torch.tensor(errors).max()), STEP_BOUND, "the largest logit", backend)


def prompts(device: DeviceKind) -> Comparison:
    """A whole prompt at once, with weights of four bits."""
    backend, errors = _backend(device), []
    for shape, kv in CASES:
        reference, decoder = _decoders(shape, "w4", kv, device)
        tokens = _tokens(shape)
        errors.append(_error(decoder.extend(tokens), reference.extend(tokens)))
    return Comparison(float(torch.tensor(errors).max()), PROMPT_BOUND, "the largest logit", backend)


def _backend(device: DeviceKind) -> str:
    if device is DeviceKind.CPU:
        return f"native-{best_instruction_set()}"
    if find_spec("triton") is None:
        raise UnsupportedError("The decoder for CUDA needs Triton; install it with: pip install triton.")
    return "triton, recorded as a CUDA graph"


def _decoders(
    shape: Shape, kind: WeightKind, kv: CacheKind, device: DeviceKind
) -> tuple[ReferenceDecoder, ProgramDecoder]:
    program = _program(shape, pack, kind)
    reference = ReferenceDecoder(program, kv)
    decoder: ProgramDecoder
    if device is DeviceKind.CPU:
        decoder = CpuDecoder(program, kv, threads=torch.get_num_threads())
    else:
        place = torch.device(device.value)
        decoder = CudaDecoder(_program(shape, partial(_pack_for, place), kind, place), kv)
    reference.begin(SEQUENCES, CAPACITY)
    decoder.begin(SEQUENCES, CAPACITY)
    return reference, decoder


def _tokens(shape: Shape) -> torch.Tensor:
    source = torch.Generator().manual_seed(shape.heads + shape.kv_heads)
    return torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=source)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu() - expected).abs().max() / expected.abs().max())


def _pack_for(
    place: torch.device, weight: torch.Tensor, bias: torch.Tensor | None, kind: WeightKind, group: int
) -> Matrix:
    """Packed on the CPU, so that the numbers are those of the reference, and moved."""
    made = pack_for_cuda(weight, bias, kind, group)
    scale, bias, unit = (
        part if part is None else part.to(place) for part in (made.scale, made.bias, made.unit)
    )
    return replace(made, numbers=made.numbers.to(place), scale=scale, bias=bias, unit=unit)


def _program(shape: Shape, packing: Packing, kind: WeightKind, place: torch.device = CPU) -> Program:
    """Random weights whose outputs are about as large as their inputs; the same for every packing."""
    draw = Draw(DeviceKind.CPU)

    def matrix(outputs: int, inputs: int, biased: bool = True) -> Matrix:
        weight, bias = draw(outputs, inputs, size=inputs**-0.5), draw(outputs, size=0.1)
        return packing(weight, bias if biased else None, kind, GROUP)

    def norm(width: int = shape.width) -> Norm:
        weight, bias = ((draw(width, size=0.1) + one).to(place) for one in (1, 0))
        return Norm("rms", weight, None, 1e-5) if shape.gated else Norm("layer", weight, bias, 1e-5)

    def head_norm(heads: int) -> HeadNorm | None:
        return HeadNorm(norm(heads * shape.head_size), shape.head_size) if shape.mixed else None

    def mixture() -> Mixture:
        """Of which the first expert is never chosen: no last bit decides that."""
        made = tuple(
            Expert((matrix(2 * shape.inner, shape.width),), matrix(shape.width, shape.inner))
            for _ in range(3)
        )
        bias = torch.tensor([0.0, 2.0, 4.0], device=place)
        return Mixture(matrix(3, shape.width), made, chosen=2, choice_bias=bias)

    def block() -> Block:
        return Block(
            first=norm(),
            qkv=tuple(matrix(outputs, shape.width) for outputs in shape.qkv),
            output=matrix(shape.width, shape.heads * shape.head_size),
            second=norm(),
            mlp=mixture()
            if shape.mixed
            else Mlp(
                gate=matrix(shape.inner, shape.width, biased=False) if shape.gated else None,
                up=matrix(shape.inner, shape.width),
                down=matrix(shape.width, shape.inner),
            ),
            rotary=0 if shape.gated else None,
            scale=shape.head_size**-0.5,
            window=7 if shape.gated else None,
            query_norm=head_norm(shape.heads),
            key_norm=head_norm(shape.kv_heads),
            sinks=draw(shape.heads).to(place) if shape.mixed else None,
            after_attention=norm() if shape.mixed else None,
        )

    def table(rows: int, size: float) -> Matrix:
        return packing(draw(rows, shape.width, size=size), None, "bf16" if kind == "bf16" else "w8", GROUP)

    def rotary(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = shape.head_size
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        return angles.cos().to(place), angles.sin().to(place)

    head = matrix(VOCABULARY, shape.width, biased=False)
    return Program(
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        inner=shape.inner,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        activation="silu" if shape.gated else "gelu_tanh",
        embedding=table(VOCABULARY, 1.0) if shape.gated else head,
        positions=None if shape.gated else table(CONTEXT, 0.3 * shape.width**-0.5),
        rotaries=(rotary,) if shape.gated else (),
        rotary_size=shape.head_size if shape.gated else 0,
        blocks=tuple(block() for _ in range(shape.blocks)),
        final=norm(),
        head=head,
        score_cap=5.0 if shape.mixed else None,
    )


KERNELS = {f"decode_step_{kind}": KernelCheck(partial(steps, kind)) for kind in WEIGHT_KINDS}
KERNELS["decode_prompt"] = KernelCheck(prompts)
