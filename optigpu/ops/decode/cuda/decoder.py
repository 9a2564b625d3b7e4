"""A decoder on an NVIDIA GPU: a step's Triton kernels, recorded once as a CUDA graph and replayed for each token.

    decoder = CudaDecoder(program, kv="bf16")
    decoder.begin(sequences=1, capacity=160)
    logits = decoder.extend(prompt)                       # the prompt, int64 [1, 32]
    tokens = decoder.decode(logits.argmax(-1, keepdim=True), steps=127)

The program's matrices are those of cuda/packing.py. With TRITON_INTERPRET=1 in the environment, a program on the CPU
runs in Triton's interpreter: slowly, and with the same results but for the order of sums.

Many tokens at once are matrix products in bfloat16 by torch: weights are widened to it one matrix at a time, and
activations, queries, keys and values rounded, where a step has int8 activations and float32 queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from optigpu.ops.decode import calls
from optigpu.ops.decode.cuda.packing import joined, rows_from_cuda, unpack_from_cuda
from optigpu.ops.decode.cuda.state import LayerCache
from optigpu.ops.decode.program import (
    Block,
    CacheKind,
    Matrix,
    Mixture,
    Mlp,
    Norm,
    Program,
    RotaryTable,
    Sampling,
    block_matrices,
)
from optigpu.ops.operands import INT8_LARGEST
from optigpu.vocabulary import ReplicateError, UnsupportedError

if TYPE_CHECKING:
    from optigpu.ops.decode.cuda.decode_step import CudaDecodeStep


def unknown_to_cuda(program: Program) -> str | None:
    """What the kernels lack of a program, in a sentence's words, or None."""
    plain = program.rotary_size in (0, program.head_size) and len(program.rotaries) <= 1
    turned = {block.rotary for block in program.blocks}
    norms = [norm for block in program.blocks for norm in (block.query_norm, block.key_norm)]
    lacks = {
        "blocks without a norm before them": any(
            not (block.first and block.second) for block in program.blocks
        ),
        "norms after attention or MLP": any(
            block.after_attention or block.after_mlp for block in program.blocks
        ),
        "norms of queries and keys": any(norms),
        "attention sinks": any(block.sinks is not None for block in program.blocks),
        "rotary embeddings of some blocks or of parts of heads": not plain or len(turned) > 1,
        "rotary embeddings of neighbouring numbers": program.neighbours,
        "queries, keys and values by groups": program.by_groups,
        "blocks whose attention and MLP run in parallel": program.parallel,
        "scaled embeddings or residuals": (program.embedding_scale, program.residual_scale) != (1, 1),
        "soft caps": program.score_cap is not None or program.logit_cap is not None,
        "mixtures of experts": any(isinstance(block.mlp, Mixture) for block in program.blocks),
        "the activation relu2": program.activation == "relu2",
    }
    return next((words for words, lacking in lacks.items() if lacking), None)


MOST_OUTPUTS = 2**30
"""The most outputs of a matrix: the kernels count them in int32, and load some tiles ahead."""


class CudaDecoder(calls.ProgramDecoder):
    """Runs a program whose matrices cuda/packing.py packed.

    Greedy decoding stays on the device; sampling draws between the steps, in torch. Queries, keys and values of a block
    that are several matrices are joined to one, which is a copy of them. Raises UnsupportedError off a GPU and for what
    the kernels do not know, and ValueError for another kind of cache or a matrix of more than MOST_OUTPUTS.
    """

    def __init__(self, program: Program, kv: CacheKind = "bf16") -> None:
        if kv not in ("bf16", "int8"):
            raise ValueError(f"kv must be bf16 or int8, not {kv}.")
        unknown = unknown_to_cuda(program)
        if unknown:
            raise UnsupportedError(f"The CUDA decoder does not know {unknown} yet; run this model on a CPU.")
        parts = (block_matrices(block) for block in program.blocks)
        largest = max(matrix.outputs for part in ((program.head,), *parts) for matrix in part)
        if largest > MOST_OUTPUTS:
            raise ValueError(
                f"The CUDA decoder takes matrices of at most {MOST_OUTPUTS} outputs; one has {largest}."
            )
        _check_device(program.device)
        blocks = tuple(replace(block, qkv=joined(block.qkv)) for block in program.blocks)
        self._program = replace(program, blocks=blocks)
        self._kv: CacheKind = kv
        self._step: CudaDecodeStep | None = None
        self._length = 0
        self._seen = False

    def begin(self, sequences: int, capacity: int) -> None:
        calls.check_cache_size(sequences, capacity)
        self._length, self._seen = 0, False
        step = self._step
        if step is not None and (step.sequences, step.capacity) == (sequences, capacity):
            step.reset()
            return
        self._step = step = None  # before there is another
        from optigpu.ops.decode.cuda.decode_step import CudaDecodeStep

        program = self._program
        try:
            step = CudaDecodeStep(program, self._kv, sequences, capacity)
        except RuntimeError as error:  # also torch's OutOfMemoryError
            numbers = 2 * len(program.blocks) * sequences * capacity * program.kv_heads * program.head_size
            needed = numbers * (2 if self._kv == "bf16" else 1) / 2**30
            raise UnsupportedError(
                f"There is not enough memory for a cache of {capacity} tokens of {sequences} sequences "
                f"({needed:.1f} GiB): use a shorter text or fewer sequences."
            ) from error
        if program.device.type == "cuda":
            step.record()
        self._step = step

    @property
    def length(self) -> int:
        return self._length

    @property
    def logits(self) -> torch.Tensor:
        if self._step is None or not self._seen:
            raise calls.no_logits()
        return self._step.logits.clone()

    @property
    def cache_bytes(self) -> int:
        return self._step.cache_bytes if self._step else 0

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last one is a step, those before it go through `prefill`. After an error the cache is as before."""
        step = self._ready(tokens, tokens.shape[-1])
        before = self._length
        tokens = tokens.to(self._program.device)
        if tokens.shape[1] > 1:
            prefill(self._program, step.layers, step.rotary, tokens[:, :-1], before)
        step.state.position.fill_(before + tokens.shape[1] - 1)
        step.state.tokens.copy_(tokens[:, -1])
        step.run()
        self._advance(step, before + tokens.shape[1])
        return self.logits

    def decode_into(
        self, chosen: torch.Tensor, tokens: torch.Tensor, at_once: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        steps, sampling = chosen.shape[1], sampling or Sampling()
        calls.check_steps(tokens, steps, at_once)
        step = self._ready(tokens, steps)
        before = self._length
        step.state.tokens.copy_(tokens[:, 0])
        for start in range(0, steps, at_once):
            count = min(at_once, steps - start)
            for done in range(before + start, before + start + count):
                step.run()
                if sampling.temperature > 0:
                    drawn = _drawn(step.logits, sampling, done + 1)
                    step.state.tokens.copy_(drawn)
                    step.state.chosen[:, done] = drawn
            self._advance(step, before + start + count)
            yield count
        chosen.copy_(step.state.chosen[:, before : before + steps])

    def _ready(self, tokens: torch.Tensor, more: int) -> "CudaDecodeStep":
        """The step, once the tokens fit it and `more` positions are free."""
        step = self._step
        if step is None:
            raise calls.no_cache()
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[0] != step.sequences or not more:
            raise calls.wrong_tokens(tokens, step.sequences)
        least, largest, last = int(tokens.min()), int(tokens.max()), self._program.vocabulary - 1
        if least < 0 or largest > last:
            wrong = least if least < 0 else largest
            raise ValueError(f"Token id {wrong} is out of range: this model's ids are 0 to {last}.")
        room = min(step.capacity, self._program.context)
        if self._length + more > room:
            raise ReplicateError(
                f"Position {self._length + more - 1} is out of range: the cache has room for {room} tokens."
            )
        return step

    def _advance(self, step: "CudaDecodeStep", length: int) -> None:
        """Counts what is in the cache now. Raises ReplicateError where its numbers are not finite."""
        if bool(step.state.not_finite.any()):
            step.state.not_finite.zero_()
            step.state.position.fill_(self._length)
            raise ReplicateError("The logits are no longer finite: the weights or the activations overflow.")
        self._length, self._seen = length, True


def _check_device(device: torch.device) -> None:
    if device.type == "cuda":
        return
    try:
        from triton import knobs
    except ImportError as error:
        raise UnsupportedError(
            "The CUDA decoder needs triton: install the version that belongs to this torch."
        ) from error
    if not knobs.runtime.interpret:
        raise UnsupportedError(f"The CUDA decoder needs an NVIDIA GPU; this program is on {device}.")


def _drawn(logits: torch.Tensor, sampling: Sampling, position: int) -> torch.Tensor:
    """Draws a token for each sequence, int64 [sequences], by the inverse of the cumulative distribution.

    The numbers from 0 to 1 depend on seed, sequence and position alone, as in engine.h: splitmix64 (Steele et al.,
    2014).
    """
    ends = (logits.double() / sampling.temperature).softmax(dim=1).cumsum(dim=1)
    mixed = (_mixed(_mixed(_mixed(sampling.seed) + row) + position) for row in range(logits.shape[0]))
    points = [(bits >> 11) * 2.0**-53 for bits in mixed]
    at = torch.tensor(points, dtype=torch.float64, device=logits.device)[:, None] * ends[:, -1:]
    return torch.searchsorted(ends, at, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


ROWS_AT_ONCE = 512
"""The most tokens of all sequences in one pass, which bounds its memory beside the cache."""


def prefill(
    program: Program,
    layers: Sequence[LayerCache],
    table: "RotaryTable | None",
    tokens: torch.Tensor,
    start: int,
) -> None:
    """Appends keys and values of tokens, int64 [sequences, count], at the positions from `start` on."""
    for part in tokens.split(max(1, ROWS_AT_ONCE // tokens.shape[0]), dim=1):
        _append_part(program, layers, table, part, start)
        start += part.shape[1]


def _append_part(
    program: Program,
    layers: Sequence[LayerCache],
    table: "RotaryTable | None",
    tokens: torch.Tensor,
    start: int,
) -> None:
    stop = start + tokens.shape[1]
    x = rows_from_cuda(program.embedding, tokens)  # [sequences, count, width]
    if program.positions is not None:
        x = x + rows_from_cuda(program.positions, torch.arange(start, stop, device=tokens.device))
    angles = None if table is None else (table[0][start:stop], table[1][start:stop])
    last = len(program.blocks) - 1
    for index, (block, layer) in enumerate(zip(program.blocks, layers, strict=True)):
        h = _norm(x, block.first)
        found = torch.cat([_linear(h, matrix) for matrix in block.qkv], dim=2)
        heads = found.unflatten(2, (-1, program.head_size)).transpose(1, 2)  # [sequences, heads, count, size]
        query, key, value = heads.split([program.heads, program.kv_heads, program.kv_heads], dim=1)
        _append(layer, _turned(key, angles), value, start)
        if index == last:
            return  # the outputs of these tokens are not needed
        x = x + _linear(_attended(block, layer, _turned(query, angles), start), block.output)
        h = _norm(x, block.second)
        activated = calls.ACTIVATIONS[program.activation]
        mlp = block.mlp
        assert isinstance(mlp, Mlp)  # or the program was refused
        up = _linear(h, mlp.up)
        inner = activated(up) if mlp.gate is None else activated(_linear(h, mlp.gate)) * up
        x = x + _linear(inner, mlp.down)


def _turned(heads: torch.Tensor, angles: "RotaryTable | None") -> torch.Tensor:
    if angles is None:
        return heads
    cosine, sine = angles
    first, second = heads.chunk(2, dim=3)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=3)


def _append(layer: LayerCache, key: torch.Tensor, value: torch.Tensor, start: int) -> None:
    stop = start + key.shape[2]
    pairs = ((layer.keys, layer.key_steps, key), (layer.values, layer.value_steps, value))
    for numbers, steps, new in pairs:
        if steps is None:
            numbers[:, :, start:stop] = new.to(numbers.dtype)
            continue
        largest = new.abs().amax(dim=3, keepdim=True)
        scaled = new * (INT8_LARGEST / largest).nan_to_num(0, 0, 0)
        numbers[:, :, start:stop] = scaled.round().to(numbers.dtype)
        steps[:, :, start:stop] = largest[..., 0] / INT8_LARGEST


def _attended(block: Block, layer: LayerCache, query: torch.Tensor, start: int) -> torch.Tensor:
    """[sequences, count, heads * head_size] of queries [sequences, heads, count, head_size]."""
    stop = start + query.shape[2]
    now = torch.arange(start, stop, device=query.device)[:, None]
    token = torch.arange(stop, device=query.device)
    seen = token <= now
    if block.window is not None:
        seen &= token > now - block.window
    found = torch.nn.functional.scaled_dot_product_attention(
        query.to(torch.bfloat16),
        _kept(layer.keys, layer.key_steps, stop),
        _kept(layer.values, layer.value_steps, stop),
        attn_mask=seen,
        scale=block.scale,
        enable_gqa=True,
    )
    return found.float().transpose(1, 2).flatten(2)


def _kept(numbers: torch.Tensor, steps: torch.Tensor | None, stop: int) -> torch.Tensor:
    if steps is None:
        return numbers[:, :, :stop]
    return (numbers[:, :, :stop].float() * steps[:, :, :stop, None]).to(torch.bfloat16)


def _linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    weight = matrix.numbers if matrix.kind == "bf16" else unpack_from_cuda(matrix).to(torch.bfloat16)
    y = torch.nn.functional.linear(x.to(torch.bfloat16), weight).float()
    return y if matrix.bias is None else y + matrix.bias


def _norm(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return x
    if norm.kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.epsilon)
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.epsilon)
    return y if norm.bias is None else y + norm.bias
