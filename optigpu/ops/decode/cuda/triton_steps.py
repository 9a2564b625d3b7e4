"""The other kernels of a decode step, besides embedding, linear layers and attention, in Triton.

`query_key_value_call` norms the residual, multiplies, turns queries and keys, and appends to the cache, and
`choose_call` takes the most likely tokens and goes on to the next position. Tokens and positions stay on the device, so
that one recorded graph serves every step.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from optigpu.ops.decode.cuda import triton_linear as linear
from optigpu.ops.decode.cuda.state import LayerCache, State
from optigpu.ops.decode.cuda.triton_products import activations, in_units, products, weights
from optigpu.ops.decode.program import CacheKind, Matrix, Norm, WeightKind
from optigpu.ops.kernel import Argument, Example, KernelCall, without_memory
from optigpu.ops.launch import LaunchTarget


def query_key_value_call(
    x: torch.Tensor,
    norm: Norm | None,
    matrix: Matrix,
    first_head: int,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    position: torch.Tensor,
    query: torch.Tensor,
    layer: LayerCache,
    target: LaunchTarget,
) -> KernelCall:
    """The heads from `first_head` on that the matrix has, in the order of Block.qkv: queries, then keys, then values.

    x: float32 [sequences, width]; query: float32 [sequences, heads, head_size]. Keys and values go to a bfloat16 cache
    at the position, or to what is fresh for an int8 cache; rotary: the tables of Program.rotary.
    """
    rows, heads, head_size = query.shape
    kv_heads, capacity = layer.keys.shape[1:3]
    launch = linear.launch_of(matrix, matrix.outputs // 2, rows, target, streams=2)
    cosine, sine = (x, x) if rotary is None else rotary
    arguments: list[Argument] = [x, *linear.norm_arguments(norm, x), *linear.matrix_arguments(matrix, x)]
    arguments += [cosine, sine, position, query, layer.keys, layer.values, layer.fresh]
    arguments += [rows, matrix.outputs, first_head, heads, kv_heads, capacity]
    constants = linear.matrix_flags(matrix, target) | linear.norm_flags(norm)
    constants |= {
        "HEAD": head_size,
        "ROTARY": rotary is not None,
        "INT8": layer.key_steps is not None,
        "ROWS": launch.rows,
        "TILE": launch.tile,
    }
    return KernelCall(query_key_value_kernel, launch.grid, tuple(arguments), constants, launch.warps)


def choose_call(best: linear.Best, state: State) -> KernelCall:
    """Takes each sequence's most likely token as its next one, and advances the position."""
    rows, programs = best.value.shape
    tensors = (best.value, best.index, state.tokens, state.position, state.not_finite, state.chosen)
    arguments = (*tensors, programs, state.chosen.shape[1])
    return KernelCall(choose_kernel, (rows,), arguments, {"BLOCK": triton.next_power_of_2(programs)})


def examples(target: LaunchTarget) -> Iterator[Example]:
    """The steps of an 8B model and of GPT-2."""
    kinds: tuple[tuple[WeightKind, CacheKind], ...] = (
        *(("w3k", "bf16"), ("w4", "bf16"), ("w4k", "bf16")),
        ("bf16", "int8"),
    )
    for kind, kv in kinds:
        layer = LayerCache.empty(kv, 1, 8, 4096, 128, torch.device("meta"))
        call = query_key_value_call(
            without_memory(1, 4096),
            linear.norm_without_memory("rms", 4096),
            linear.matrix_without_memory(kind, 6144, 4096),
            0,
            (without_memory(4096, 64), without_memory(4096, 64)),
            without_memory(1, dtype=torch.int32),
            without_memory(1, 32, 128),
            layer,
            target,
        )
        yield Example(f"{kind}, 4096 to 6144, rotary, {kv} cache", call)
    call = query_key_value_call(
        without_memory(2, 768),
        linear.norm_without_memory("layer", 768),
        linear.matrix_without_memory("w8", 2304, 768, bias=True),
        0,
        None,
        without_memory(2, dtype=torch.int32),
        without_memory(2, 12, 64),
        LayerCache.empty("bf16", 2, 12, 1024, 64, torch.device("meta")),
        target,
    )
    yield Example("w8, 768 to 2304, 2 rows, bf16 cache", call)
    best = linear.best_of(linear.matrix_without_memory("w8", 128256, 4096), 1, target)
    yield Example("of 128256", choose_call(best, State.empty(1, 1024, torch.device("meta"))))


@triton.jit
def bfloat16(x):
    """Rounded half to even by integers: a GPU's conversion does so too, and the interpreter's cuts off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


@triton.jit
def query_key_value_kernel(
    x,
    norm_weight,
    norm_bias,
    epsilon,
    numbers,
    scale,
    unit,
    bias,
    cosine,
    sine,
    position,
    query,
    keys,
    values,
    fresh,
    rows,
    outputs,
    first_head,
    heads,
    kv_heads,
    capacity,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    DP4A: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    HEAD: tl.constexpr,
    ROTARY: tl.constexpr,
    INT8: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """As linear_kernel; an output goes with the one that it is turned with, half a head further on."""
    HALF: tl.constexpr = HEAD // 2
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) * TILE
    ahead = tl.num_programs(0) * TILE
    pair = start + tl.arange(0, TILE)
    one = pair // HALF * HEAD + pair % HALF
    w1, w2, w3 = weights(numbers, scale, one, outputs, KIND, GROUP, INPUTS, PADDED)
    v1, v2, v3 = weights(numbers, scale, one + HALF, outputs, KIND, GROUP, INPUTS, PADDED)
    x1, x2, x3 = activations(
        x, norm_weight, norm_bias, epsilon, row, rows, KIND, GROUP, INPUTS, PADDED, NORM, NORM_BIAS
    )
    now = tl.load(position + row, mask=row < rows, other=0)
    far_row = row.to(tl.int64)[:, None]
    for place in range(start, outputs // 2, ahead):
        pair = place + tl.arange(0, TILE)
        next_one = (pair + ahead) // HALF * HEAD + (pair + ahead) % HALF
        n1, n2, n3 = weights(numbers, scale, next_one, outputs, KIND, GROUP, INPUTS, PADDED)
        m1, m2, m3 = weights(numbers, scale, next_one + HALF, outputs, KIND, GROUP, INPUTS, PADDED)
        column = pair % HALF
        one = pair // HALF * HEAD + column
        first = in_units(products(w1, w2, w3, x1, x2, x3, KIND, DP4A), unit, one, outputs, KIND)
        second = in_units(products(v1, v2, v3, x1, x2, x3, KIND, DP4A), unit, one + HALF, outputs, KIND)
        if BIAS:
            first += tl.load(bias + one, mask=one < outputs, other=0.0)[None, :]
            second += tl.load(bias + one + HALF, mask=one < outputs, other=0.0)[None, :]
        head = (first_head + pair // HALF)[None, :]
        inside = (row < rows)[:, None] & (one < outputs)[None, :]
        if ROTARY:
            angle = now[:, None] * HALF + column[None, :]
            turned = inside & (head < heads + kv_heads)
            c = tl.load(cosine + angle, mask=turned, other=1.0)
            s = tl.load(sine + angle, mask=turned, other=0.0)
            was = first
            first = was * c - second * s
            second = second * c + was * s
        to = query + (far_row * heads + head) * HEAD + column[None, :]
        tl.store(to, first, mask=inside & (head < heads))
        tl.store(to + HALF, second, mask=inside & (head < heads))
        if INT8:
            to = fresh + (far_row * 2 * kv_heads + head - heads) * HEAD + column[None, :]
            tl.store(to, first, mask=inside & (head >= heads))
            tl.store(to + HALF, second, mask=inside & (head >= heads))
        else:
            a, b = bfloat16(first), bfloat16(second)
            key = head - heads
            is_key = inside & (key >= 0) & (key < kv_heads)
            to = ((far_row * kv_heads + key) * capacity + now[:, None]) * HEAD + column[None, :]
            tl.store(keys + to, a, mask=is_key)
            tl.store(keys + to + HALF, b, mask=is_key)
            to = ((far_row * kv_heads + key - kv_heads) * capacity + now[:, None]) * HEAD + column[None, :]
            tl.store(values + to, a, mask=inside & (key >= kv_heads))
            tl.store(values + to + HALF, b, mask=inside & (key >= kv_heads))
        w1, w2, w3 = n1, n2, n3
        v1, v2, v3 = m1, m2, m3


@triton.jit
def choose_kernel(
    best_value, best_index, tokens, position, not_finite, chosen, programs, capacity, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    program = tl.arange(0, BLOCK)
    inside = program < programs
    value = tl.load(best_value + row * programs + program, mask=inside, other=float("-inf"))
    index = tl.load(best_index + row * programs + program, mask=inside, other=0)
    wrong_ones = tl.sum((value != value).to(tl.int32), axis=0)
    value = tl.where(value != value, float("-inf"), value)
    token = tl.min(tl.where(value == tl.max(value, axis=0), index, 0x7FFFFFFF), axis=0).to(tl.int64)
    at = tl.load(position + row)
    tl.store(tokens + row, token)
    tl.store(chosen + row.to(tl.int64) * capacity + at, token)
    tl.store(position + row, at + 1)
    tl.store(not_finite + row, tl.load(not_finite + row) | (wrong_ones > 0).to(tl.int32))
