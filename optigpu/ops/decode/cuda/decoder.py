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

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from optigpu.ops.decode import calls
from optigpu.ops.decode.cuda.packing import joined, rows_from_cuda, unpack_from_cuda
from optigpu.ops.decode.cuda.state import LayerCache
from optigpu.ops.decode.program import (
    Activation,
    Block,
    CacheKind,
    HeadNorm,
    Matrix,
    Mixture,
    Mlp,
    Norm,
    Program,
    Sampling,
    block_matrices,
)
from optigpu.ops.operands import INT8_LARGEST
from optigpu.vocabulary import ReplicateError, UnsupportedError

if TYPE_CHECKING:
    from optigpu.ops.decode.cuda.decode_step import CudaDecodeStep


MOST_OUTPUTS = 2**30
"""The most outputs of a matrix, or of all of a block: the kernels count them in int32, and load some tiles ahead."""


class CudaDecoder(calls.ProgramDecoder):
    """Runs a program whose matrices cuda/packing.py packed.

    Greedy decoding stays on the device; sampling draws between the steps, in torch. Queries, keys and values of a block
    that are several matrices are joined to one, and so are the experts', which copies those that do not follow one
    another in memory. Raises UnsupportedError off a GPU, and ValueError for another kind of cache or for more than
    MOST_OUTPUTS.
    """

    def __init__(self, program: Program, kv: CacheKind = "bf16") -> None:
        if kv not in ("bf16", "int8"):
            raise ValueError(f"kv must be bf16 or int8, not {kv}.")
        parts = ((program.head,), *(block_matrices(block) for block in program.blocks))
        largest = max(sum(matrix.outputs for matrix in part) for part in parts)
        if largest > MOST_OUTPUTS:
            raise ValueError(
                f"The CUDA decoder takes heads and blocks of at most {MOST_OUTPUTS} outputs; one has {largest}."
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
            prefill(self._program, step, tokens[:, :-1], before)
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


def prefill(program: Program, step: "CudaDecodeStep", tokens: torch.Tensor, start: int) -> None:
    """Appends keys and values of tokens, int64 [sequences, count], at the positions from `start` on."""
    for part in tokens.split(max(1, ROWS_AT_ONCE // tokens.shape[0]), dim=1):
        _append_part(program, step, part, start)
        start += part.shape[1]


def _append_part(program: Program, step: "CudaDecodeStep", tokens: torch.Tensor, start: int) -> None:
    """On rows, which are the tokens of one sequence after those of the other."""
    stop, scale = start + tokens.shape[1], program.residual_scale
    places = torch.arange(start, stop, device=tokens.device).repeat(len(tokens))
    x = rows_from_cuda(program.embedding, tokens.flatten()) * program.embedding_scale
    if program.positions is not None:
        x = x + rows_from_cuda(program.positions, places)
    for block, layer in zip(program.blocks, step.layers, strict=True):
        h = _norm(x, block.first)
        found = torch.cat([_linear(h, matrix) for matrix in block.qkv], dim=1)
        query, key, value = calls.split_heads(found.unflatten(1, (-1, program.head_size)), program)
        query, key = _norm_heads(query, block.query_norm), _norm_heads(key, block.key_norm)
        if block.rotary is not None:
            cosines, sines = (table[places, None] for table in step.rotaries[block.rotary])
            query, key = (
                calls.turned(cosines, sines, each, neighbours=program.neighbours) for each in (query, key)
            )
        query, key, value = (each.unflatten(0, tokens.shape).transpose(1, 2) for each in (query, key, value))
        _append(layer, key, value, start)
        if layer is step.layers[-1]:
            return  # the outputs of these tokens are not needed
        before = x
        attended = _attended(block, layer, query, start, program.score_cap).flatten(0, 1)
        x = x + scale * _norm(_linear(attended, block.output), block.after_attention)
        h = _norm(before if program.parallel else x, block.second)
        x = x + scale * _norm(_mlp(h, block.mlp, program.activation), block.after_mlp)


def _norm_heads(heads: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
    """[rows, heads, head_size]."""
    return heads if norm is None else _norm(heads.flatten(1), norm.norm, norm.together).view_as(heads)


def _mlp(h: torch.Tensor, mlp: Mlp | Mixture, activation: Activation) -> torch.Tensor:
    """Experts are chosen in float32, so that they are those of a step."""
    if isinstance(mlp, Mixture):
        routed = torch.nn.functional.linear(h, unpack_from_cuda(mlp.router), mlp.router.bias)
        return calls.mixed(h, routed, mlp, _linear, activation)
    activated, up = calls.ACTIVATIONS[activation], _linear(h, mlp.up)
    inner = activated(up) if mlp.gate is None else activated(_linear(h, mlp.gate)) * up
    return _linear(inner, mlp.down)


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


def _attended(
    block: Block, layer: LayerCache, query: torch.Tensor, start: int, cap: float | None
) -> torch.Tensor:
    """[sequences, count, heads * head_size] of queries [sequences, heads, count, head_size]."""
    stop = start + query.shape[2]
    now = torch.arange(start, stop, device=query.device)[:, None]
    token = torch.arange(stop, device=query.device)
    seen = token <= now
    if block.window is not None:
        seen &= token > now - block.window
    keys, values = _kept(layer.keys, layer.key_steps, stop), _kept(layer.values, layer.value_steps, stop)
    if cap is None and block.sinks is None:
        found = torch.nn.functional.scaled_dot_product_attention(
            query.to(torch.bfloat16), keys, values, attn_mask=seen, scale=block.scale, enable_gqa=True
        )
        return found.float().transpose(1, 2).flatten(2)
    group, parts = query.shape[1] // keys.shape[1], []
    for head, q in enumerate(query.unbind(1)):  # one after the other, which bounds the memory of their scores
        scores = block.scale * q @ keys[:, head // group].float().mT
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        scores = scores.masked_fill(~seen, -torch.inf)
        if block.sinks is not None:
            scores = torch.cat([scores, block.sinks[head].expand(*scores.shape[:2], 1)], dim=2)
        parts.append(scores.softmax(dim=2)[..., :stop] @ values[:, head // group].float())
    return torch.cat(parts, dim=2)


def _kept(numbers: torch.Tensor, steps: torch.Tensor | None, stop: int) -> torch.Tensor:
    if steps is None:
        return numbers[:, :, :stop]
    return (numbers[:, :, :stop].float() * steps[:, :, :stop, None]).to(torch.bfloat16)


def _linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    weight = matrix.numbers if matrix.kind == "bf16" else unpack_from_cuda(matrix).to(torch.bfloat16)
    y = torch.nn.functional.linear(x.to(torch.bfloat16), weight).float()
    return y if matrix.bias is None else y + matrix.bias


def _norm(x: torch.Tensor, norm: Norm | None, together: int | None = None) -> torch.Tensor:
    """Of all of the last dimension, or of as many numbers at a time."""
    if norm is None:
        return x
    parts = x.unflatten(-1, (-1, together or x.shape[-1]))
    if norm.kind == "layer":
        y = torch.nn.functional.layer_norm(parts, parts.shape[-1:], eps=norm.epsilon)
    else:
        y = torch.nn.functional.rms_norm(parts, parts.shape[-1:], eps=norm.epsilon)
    y = y.flatten(-2) * norm.weight
    return y if norm.bias is None else y + norm.bias
