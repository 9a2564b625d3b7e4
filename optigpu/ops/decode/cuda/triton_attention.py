"""Attention of a new token over the valid part of a cache, in Triton: parts at once, and a pass that joins them.

A program has one head of keys and values of one sequence, all the query heads that share it, and one part of the
tokens. It takes TOKENS of them at a time, and each of those places keeps a softmax of its own, so that threads wait for
each other only at the end. Queries, sums and the softmax are float32.

Each program norms and turns its queries from what Block.qkv's product left. The one that has the last part does so with
the new key, rounds it and the new value, and attends to what it has rounded.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from optigpu.ops.decode.cuda.state import LayerCache
from optigpu.ops.decode.cuda.triton_linear import (
    matrix_without_memory,
    norm_arguments,
    norm_flags,
    norm_without_memory,
)
from optigpu.ops.decode.cuda.triton_products import bfloat16, capped, rounded
from optigpu.ops.decode.program import Block, CacheKind, HeadNorm, Mlp, Program
from optigpu.ops.launch import Argument, Example, KernelCall, LaunchTarget, without_memory

LOWEST_SCORE = tl.constexpr(-1e30)
"""Less than any score. Unlike with infinity, its difference from itself is zero."""
NUMBERS = 8192
"""Of the sums that a program keeps: 64 for each of 128 threads, beside two loads of keys and two of values."""
MOST_TOKENS = 128
WARPS = 4
MOST_PARTS = 32


@dataclass(frozen=True)
class PartialSoftmax:
    """The softmax's intermediate results, float32: sums [sequences * heads, parts, head_size]; tops and totals
    [sequences * heads, parts]."""

    sums: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor

    @staticmethod
    def of(heads: int, layer: LayerCache, target: LaunchTarget) -> "PartialSoftmax":
        """Room for the parts of a full cache, at most one for each program that can run at once."""
        rows, kv_heads, capacity, head_size = layer.keys.shape
        free = triton.cdiv(target.warps // WARPS, rows * kv_heads)
        blocks = triton.cdiv(capacity, tokens_at_once(heads // kv_heads, head_size))
        count = triton.next_power_of_2(max(1, min(MOST_PARTS, free, blocks)))
        tops = torch.empty(rows * heads, count, device=layer.keys.device)
        sums = torch.empty(rows * heads, count, head_size, device=layer.keys.device)
        return PartialSoftmax(sums, tops, torch.empty_like(tops))


def tokens_at_once(sharing: int, head_size: int) -> int:
    """TOKENS of a program whose key head `sharing` query heads share."""
    sums = triton.next_power_of_2(sharing) * triton.next_power_of_2(head_size)
    return int(max(1, min(MOST_TOKENS, NUMBERS // sums)))


def attend_call(
    found: torch.Tensor,
    program: Program,
    block: Block,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    layer: LayerCache,
    parts: PartialSoftmax,
    position: torch.Tensor,
) -> KernelCall:
    """Appends the new token to the cache at its position, int32 [sequences]; the softmax over the tokens up to it.

    found: float32 [sequences, outputs of Block.qkv]; angles: the block's rotary table, float32. The softmax's
    intermediate results go to `parts`.
    """
    rows, kv_heads, capacity, head_size = layer.keys.shape
    heads, sharing = program.heads, program.heads // kv_heads
    group = sharing + 2 if program.by_groups else sharing
    # Where the first key and value stand among the outputs, and how far apart keys are.
    places = (sharing, sharing + 1, group) if program.by_groups else (heads, heads + kv_heads, 1)
    steps = (found if step is None else step for step in (layer.key_steps, layer.value_steps))
    arguments: list[Argument] = [found, *(angles or (found, found))]
    constants: dict[str, str | int | float] = {}
    for name, each in (("QUERY", block.query_norm), ("KEY", block.key_norm)):
        norm, together = (each.norm, each.together) if each else (None, head_size)
        arguments += norm_arguments(norm, found)
        flags = norm_flags(norm) | {"TOGETHER": together}
        constants |= {f"{name}_{flag}": value for flag, value in flags.items()}
    arguments += [layer.keys, layer.values, *steps, position, parts.sums, parts.tops, parts.totals]
    arguments += [block.scale, capacity, kv_heads, *places]
    constants |= {
        "WINDOW": block.window or 0,
        "CAP": program.score_cap or 0.0,
        "TURNED": 0 if angles is None else 2 * angles[0].shape[1],
        "NEIGHBOURS": program.neighbours,
        "SHARING": sharing,
        "GROUP": group,
        "HEAD": head_size,
        "TOKENS": tokens_at_once(sharing, head_size),
        "INT8": layer.key_steps is not None,
    }
    return KernelCall(_attend, (rows * kv_heads, parts.tops.shape[1]), tuple(arguments), constants, WARPS)


def join_call(parts: PartialSoftmax, sinks: torch.Tensor | None, y: torch.Tensor) -> KernelCall:
    """What attention gives, from the softmax's parts. y: float32 [sequences, heads * head_size]."""
    all_heads, count, head_size = parts.sums.shape
    constants = {"HEAD": head_size, "PARTS": count, "SINKS": 0 if sinks is None else len(sinks)}
    arguments = (parts.sums, parts.tops, parts.totals, y if sinks is None else sinks, y)
    return KernelCall(_join, (all_heads,), arguments, constants, WARPS)


def examples(target: LaunchTarget) -> Iterator[Example]:
    """Of an 8B model, of one whose heads are no power of two, and of others with norms, a cap and sinks."""
    norm, none = norm_without_memory("rms", 32), matrix_without_memory("bf16", 32, 32)
    angles, mlp = (without_memory(8192, 64), without_memory(8192, 64)), Mlp(None, none, none)
    plain = Block(norm, (none,), none, norm, mlp, 0.1, None)
    program = Program(32, 32, 8, 128, 32, 32, 8192, "silu", none, None, (), (), norm, none)
    query, key = norm_without_memory("rms", 4096), norm_without_memory("layer", 1024)
    normed = replace(plain, query_norm=HeadNorm(query, 4096), key_norm=HeadNorm(key, 128))
    parted = replace(program, heads=64, head_size=256, neighbours=True, by_groups=True, score_cap=50.0)
    scenes: tuple[tuple[str, CacheKind, Program, Block], ...] = (
        ("", "bf16", program, plain),
        ("", "int8", replace(program, heads=3, kv_heads=1, head_size=80), replace(plain, window=4096)),
        (", normed", "int8", program, normed),
        (", by groups with a cap and sinks", "bf16", parted, replace(plain, sinks=without_memory(64))),
    )
    for words, kv, of, block in scenes:
        heads, kv_heads, size = of.heads, of.kv_heads, of.head_size
        layer = LayerCache.empty(kv, 1, kv_heads, 8192, size, torch.device("meta"))
        parts = PartialSoftmax.of(heads, layer, target)
        found = without_memory(1, (heads + 2 * kv_heads) * size)
        position = without_memory(1, dtype=torch.int32)
        shape = f"{heads} heads of {size} on {kv_heads}{words}"
        turned = None if size < 128 else angles
        yield Example(f"{kv} cache, {shape}", attend_call(found, of, block, turned, layer, parts, position))
        if block is not normed:  # whose parts are joined as plain ones are
            yield Example(shape, join_call(parts, block.sinks, without_memory(1, heads * size)))


@triton.jit
def _heads(
    found,
    head,
    apart,
    norm,
    angles,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Some heads [ROWS, 1] of queries, or of keys, normed and turned, [ROWS, HEAD and what fills it up].

    `found` are the first one's numbers; SHARING of them stand together, and such groups are `apart` heads apart.
    """
    weight, bias, epsilon = norm
    cosine, sine = angles
    column = tl.arange(0, triton.next_power_of_2(HEAD))[None, :]
    inside = column < HEAD
    own = (head // SHARING * apart + head % SHARING) * HEAD + column
    value = tl.load(found + own, mask=inside, other=0.0)
    if NORM != "none":
        values, here = value, inside
        if TOGETHER > HEAD:
            number = tl.arange(0, triton.next_power_of_2(TOGETHER))[None, :]
            each, here = number // HEAD, number < TOGETHER
            place = (each // SHARING * apart + each % SHARING) * HEAD + number % HEAD
            values = tl.load(found + place, mask=here, other=0.0)
        if NORM == "layer":
            mean = (tl.sum(values, axis=1) / TOGETHER)[:, None]
            value, values = value - mean, tl.where(here, values - mean, 0.0)
        value *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=1) / TOGETHER + epsilon))[:, None]
        value *= tl.load(weight + head * HEAD + column, mask=inside, other=0.0)
        if NORM_BIAS:
            value += tl.load(bias + head * HEAD + column, mask=inside, other=0.0)
    if TURNED > 0:
        turned = column < TURNED
        if NEIGHBOURS:
            is_second, other, angle = column % 2 == 1, column ^ 1, column // 2
        else:
            is_second, angle = column >= TURNED // 2, column % (TURNED // 2)
            other = tl.where(is_second, column - TURNED // 2, column + TURNED // 2)
        other = tl.broadcast_to(tl.where(turned, other, column), value.shape)
        beside = tl.gather(value, other, axis=1)
        c = tl.load(cosine + angle, mask=turned, other=1.0)
        s = tl.load(sine + angle, mask=turned, other=0.0)
        value = value * c + tl.where(is_second, beside, -beside) * s
    return value


@triton.jit
def _attend(
    found,
    cosine,
    sine,
    query_weight,
    query_bias,
    query_epsilon,
    key_weight,
    key_bias,
    key_epsilon,
    keys,
    values,
    key_steps,
    value_steps,
    position,
    sums,
    tops,
    totals,
    scale,
    capacity,
    kv_heads,
    first_key,
    first_value,
    key_apart,
    QUERY_NORM: tl.constexpr,
    QUERY_NORM_BIAS: tl.constexpr,
    QUERY_TOGETHER: tl.constexpr,
    KEY_NORM: tl.constexpr,
    KEY_NORM_BIAS: tl.constexpr,
    KEY_TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TURNED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    SHARING: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    INT8: tl.constexpr,
):
    MEMBERS: tl.constexpr = triton.next_power_of_2(SHARING)
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    head = tl.program_id(0)  # of keys and values, of all sequences
    row = head // kv_heads
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    now = tl.load(position + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(now + 1 - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(now + 1 - first, parts), TOKENS) * TOKENS
    start = first + part * share
    stop = tl.minimum(start + share, now)
    member = tl.arange(0, MEMBERS)
    column = tl.arange(0, PADDED)
    near = tl.arange(0, TOKENS)
    own_inside = (member < SHARING)[:, None] & (column < HEAD)[None, :]
    own_key = head % kv_heads
    found += row * (SHARING + 2) * kv_heads * HEAD
    angles = (cosine + now * (TURNED // 2), sine + now * (TURNED // 2))
    own = _heads(
        *(found, own_key * SHARING + tl.minimum(member, SHARING - 1)[:, None], GROUP),
        *((query_weight, query_bias, query_epsilon), angles, QUERY_NORM, QUERY_NORM_BIAS, QUERY_TOGETHER),
        *(SHARING, HEAD, TURNED, NEIGHBOURS),
    )
    own *= scale
    q = own[:, None, :]
    row_start = head.to(tl.int64) * capacity
    top = tl.full((MEMBERS, TOKENS), LOWEST_SCORE, tl.float32)
    total = tl.zeros((MEMBERS, TOKENS), tl.float32)
    sum_ = tl.zeros((MEMBERS, TOKENS, PADDED), tl.float32)
    for at in range(start, stop, TOKENS):
        token = at + near
        inside = (token < stop)[None, :, None] & (column < HEAD)[None, None, :]
        place = (row_start + token)[None, :, None] * HEAD + column[None, None, :]
        k = tl.load(keys + place, mask=inside, other=0.0)
        v = tl.load(values + place, mask=inside, other=0.0)
        score = tl.sum(q * k.to(tl.float32), axis=2)
        if INT8:
            score *= tl.load(key_steps + row_start + token, mask=token < stop, other=0.0)[None, :]
        score = tl.where((token < stop)[None, :], capped(score, CAP), float("-inf"))
        higher = tl.maximum(top, score)
        fading = tl.exp(top - higher)
        share_of = tl.exp(score - higher)
        top = higher
        total = total * fading + share_of
        if INT8:
            share_of *= tl.load(value_steps + row_start + token, mask=token < stop, other=0.0)[None, :]
        sum_ = sum_ * fading[:, :, None] + share_of[:, :, None] * v.to(tl.float32)
    highest = tl.max(top, axis=1)
    fading = tl.exp(top - highest[:, None])
    all_ = tl.sum(total * fading, axis=1)
    mixed = tl.sum(sum_ * fading[:, :, None], axis=1)
    if (start <= now) & (now < start + share):
        new_k = _heads(
            *(found + first_key * HEAD, tl.zeros((1, 1), tl.int32) + own_key, key_apart),
            *((key_weight, key_bias, key_epsilon), angles, KEY_NORM, KEY_NORM_BIAS, KEY_TOGETHER),
            *(1, HEAD, TURNED, NEIGHBOURS),
        )
        new_k = tl.reshape(new_k, (PADDED,))
        value = found + (first_value + own_key * key_apart) * HEAD + column
        new_v = tl.load(value, mask=column < HEAD, other=0.0)
        place = row_start + now
        k_step, v_step = 1.0, 1.0
        if INT8:
            new_k, k_step = rounded(new_k)
            new_v, v_step = rounded(new_v)
            tl.store(key_steps + place, k_step)
            tl.store(value_steps + place, v_step)
            new_k, new_v = new_k.to(tl.int8), new_v.to(tl.int8)
        else:
            new_k, new_v = bfloat16(new_k), bfloat16(new_v)
        tl.store(keys + place * HEAD + column, new_k, mask=column < HEAD)
        tl.store(values + place * HEAD + column, new_v, mask=column < HEAD)
        new_score = capped(tl.sum(own * new_k.to(tl.float32)[None, :], axis=1) * k_step, CAP)
        newest = tl.maximum(highest, new_score)
        before = tl.exp(highest - newest)
        added = tl.exp(new_score - newest)
        highest = newest
        all_ = all_ * before + added
        mixed = mixed * before[:, None] + (added * v_step)[:, None] * new_v.to(tl.float32)[None, :]
    slot = (head * SHARING + member) * parts + part
    tl.store(sums + slot[:, None] * HEAD + column[None, :], mixed, mask=own_inside)
    tl.store(tops + slot, highest, mask=member < SHARING)
    tl.store(totals + slot, all_, mask=member < SHARING)


@triton.jit
def _join(sums, tops, totals, sinks, y, HEAD: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr):
    head = tl.program_id(0)
    slot = head * PARTS + tl.arange(0, PARTS)
    column = tl.arange(0, triton.next_power_of_2(HEAD))
    inside = column < HEAD
    top = tl.load(tops + slot)
    sink = tl.load(sinks + head % SINKS) if SINKS > 0 else LOWEST_SCORE
    highest = tl.maximum(tl.max(top, axis=0), sink)
    fading = tl.exp(top - highest)
    total = tl.sum(tl.load(totals + slot) * fading, axis=0) + tl.exp(sink - highest)
    part = tl.load(sums + slot[:, None] * HEAD + column[None, :], mask=inside[None, :], other=0.0)
    mixed = tl.sum(part * fading[:, None], axis=0)
    tl.store(y + head * HEAD + column, tl.div_rn(mixed, total), mask=inside)
