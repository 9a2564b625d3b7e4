"""Many tokens at once for the CUDA decoder, in torch: matrix products in bfloat16, for tensor cores.

Weights are widened to bfloat16 one matrix at a time, and activations, queries, keys and values rounded to it, where a
step of decoding has int8 activations and float32 queries. Residual, norms, rotary embeddings and what the cache keeps
are as in a step.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from optigpu.ops.decode.cuda.layer_cache import LayerCache
from optigpu.ops.decode.cuda.packing import rows_from_cuda, unpack_from_cuda
from optigpu.ops.decode.program import Activation, Block, Matrix, Norm, Program, RotaryTable
from optigpu.ops.integers import INT8_LARGEST

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
        query, key, value = _heads(program, block, _norm(x, block.first))
        _append(layer, _turned(key, angles), value, start)
        if index == last:
            return  # the outputs of these tokens are not needed
        x = x + _linear(_attended(block, layer, _turned(query, angles), start), block.output)
        h = _norm(x, block.second)
        up = _linear(h, block.up)
        if block.gate is None:
            inner = _activated(up, program.activation)
        else:
            inner = _activated(_linear(h, block.gate), program.activation) * up
        x = x + _linear(inner, block.down)


def _heads(program: Program, block: Block, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, [sequences, heads, count, head_size]."""
    found = torch.cat([_linear(h, matrix) for matrix in block.qkv], dim=2)
    heads: torch.Tensor = found.unflatten(2, (-1, program.head_size)).transpose(1, 2)
    query, key, value = heads.split([program.heads, program.kv_heads, program.kv_heads], dim=1)
    return query, key, value


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
        numbers[:, :, start:stop] = (
            (new * (INT8_LARGEST / largest).nan_to_num(0, 0, 0)).round().to(numbers.dtype)
        )
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
    """The cache up to a position, bfloat16."""
    if steps is None:
        return numbers[:, :, :stop]
    return (numbers[:, :, :stop].float() * steps[:, :, :stop, None]).to(torch.bfloat16)


def _linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    weight = matrix.numbers if matrix.kind == "bf16" else unpack_from_cuda(matrix).to(torch.bfloat16)
    y = torch.nn.functional.linear(x.to(torch.bfloat16), weight).float()
    return y if matrix.bias is None else y + matrix.bias


def _norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.epsilon)
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.epsilon)
    return y if norm.bias is None else y + norm.bias


def _activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "relu": torch.relu,
    }
    return functions[activation](x)
