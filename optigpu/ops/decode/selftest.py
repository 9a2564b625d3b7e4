"""Checks of the operators that run whole decode steps: their logits beside those of a decoder in plain torch.

On CUDA each step is a replay of the recorded graph, so the Triton kernels and the recording are in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.decode.calls import ProgramDecoder
from optigpu.ops.decode.cpu.decoder import CpuDecoder, best_instruction_set
from optigpu.ops.decode.cpu.packing import pack
from optigpu.ops.decode.cuda.decoder import CudaDecoder
from optigpu.ops.decode.cuda.packing import pack_for_cuda
from optigpu.ops.decode.program import Block, CacheKind, Matrix, Norm, Program, RotaryTable, WeightKind
from optigpu.ops.decode.reference import ReferenceDecoder
from optigpu.ops.kernel_check import KernelCheck
from optigpu.ops.kernel_operands import Draw
from optigpu.vocabulary import DeviceKind, ReplicateError, UnsupportedError

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
    embedding of its own."""

    gated: bool
    heads: int
    kv_heads: int
    width: int = 128
    head_size: int = 32
    inner: int = 256
    blocks: int = 2

    @property
    def qkv(self) -> tuple[int, ...]:
        """The outputs of the matrices of queries, keys and values."""
        shared = self.kv_heads * self.head_size
        outputs = (self.heads * self.head_size, shared, shared)
        return outputs if self.gated else (sum(outputs),)


LIKE_GPT2 = Shape(gated=False, heads=4, kv_heads=4)
LIKE_LLAMA = Shape(gated=True, heads=4, kv_heads=2)
CASES: tuple[tuple[Shape, CacheKind], ...] = ((LIKE_LLAMA, "bf16"), (LIKE_GPT2, "int8"))


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
    """Raises UnsupportedError where there is no operator."""
    if device is DeviceKind.CPU:
        return f"native-{best_instruction_set()}"
    if find_spec("triton") is None:
        raise UnsupportedError("The decoder for CUDA needs Triton; install it with: pip install triton.")
    return "triton, recorded as a CUDA graph"


def _decoders(
    shape: Shape, kind: WeightKind, kv: CacheKind, device: DeviceKind
) -> tuple[ReferenceDecoder, ProgramDecoder]:
    """The reference and the operator for the same weights, with empty caches."""
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

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(place)

    return replace(
        made,
        numbers=made.numbers.to(place),
        scale=moved(made.scale),
        bias=moved(made.bias),
        unit=moved(made.unit),
    )


def _program(shape: Shape, packing: Packing, kind: WeightKind, place: torch.device = CPU) -> Program:
    """Random weights whose outputs are about as large as their inputs; the same for every packing."""
    draw = Draw(DeviceKind.CPU)

    def matrix(outputs: int, inputs: int, biased: bool = True) -> Matrix:
        weight, bias = draw(outputs, inputs, size=inputs**-0.5), draw(outputs, size=0.1)
        return packing(weight, bias if biased else None, kind, GROUP)

    def norm() -> Norm:
        weight, bias = ((draw(shape.width, size=0.1) + one).to(place) for one in (1, 0))
        return Norm("rms", weight, None, 1e-5) if shape.gated else Norm("layer", weight, bias, 1e-5)

    def block() -> Block:
        return Block(
            first=norm(),
            qkv=tuple(matrix(outputs, shape.width) for outputs in shape.qkv),
            output=matrix(shape.width, shape.heads * shape.head_size),
            second=norm(),
            gate=matrix(shape.inner, shape.width, biased=False) if shape.gated else None,
            up=matrix(shape.inner, shape.width),
            down=matrix(shape.width, shape.inner),
            scale=shape.head_size**-0.5,
            window=7 if shape.gated else None,
        )

    def table(rows: int, size: float) -> Matrix:
        return packing(draw(rows, shape.width, size=size), None, "bf16" if kind == "bf16" else "w8", GROUP)

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
        rotary=partial(_rotary, shape.head_size, place) if shape.gated else None,
        blocks=tuple(block() for _ in range(shape.blocks)),
        final=norm(),
        head=head,
    )


def _rotary(size: int, place: torch.device, length: int) -> RotaryTable:
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    return angles.cos().to(place), angles.sin().to(place)


KERNELS = {
    "decode_step_w3k": KernelCheck(partial(steps, "w3k")),
    "decode_step_w4": KernelCheck(partial(steps, "w4")),
    "decode_step_w4k": KernelCheck(partial(steps, "w4k")),
    "decode_step_w8": KernelCheck(partial(steps, "w8")),
    "decode_step_bf16": KernelCheck(partial(steps, "bf16")),
    "decode_prompt": KernelCheck(prompts),
}
