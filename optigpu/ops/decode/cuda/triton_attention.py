"""Attention of a new token over the valid part of a cache, in Triton: parts at once, and a pass that joins them.

A program has one head of keys and values of one sequence, all the query heads that share it, and one part of the
tokens. It takes TOKENS of them at a time, and each of those places keeps a softmax of its own, so that threads wait for
each other only at the end. Queries, sums and the softmax are float32.

A bfloat16 cache has the new token already (triton_steps.py). Of an int8 cache the step of a whole head must be known
first, so the program that has the last part rounds the new key and value itself, and reads what it has rounded.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optigpu.ops.decode.cuda.state import LayerCache
from optigpu.ops.decode.cuda.triton_products import rounded
from optigpu.ops.decode.program import CacheKind
from optigpu.ops.kernel import Argument, Example, KernelCall, without_memory
from optigpu.ops.launch import LaunchTarget

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
    def of(query: torch.Tensor, layer: LayerCache, target: LaunchTarget) -> "PartialSoftmax":
        """Room for the parts of a full cache, at most one for each program that can run at once."""
        rows, heads, head_size = query.shape
        kv_heads, capacity = layer.keys.shape[1:3]
        free = triton.cdiv(target.warps // WARPS, rows * kv_heads)
        blocks = triton.cdiv(capacity, tokens_at_once(heads // kv_heads, head_size))
        count = triton.next_power_of_2(max(1, min(MOST_PARTS, free, blocks)))
        tops = torch.empty(rows * heads, count, device=query.device)
        sums = torch.empty(rows * heads, count, head_size, device=query.device)
        return PartialSoftmax(sums, tops, torch.empty_like(tops))


def tokens_at_once(sharing: int, head_size: int) -> int:
    """TOKENS of a program whose key head `sharing` query heads share."""
    sums = triton.next_power_of_2(sharing) * triton.next_power_of_2(head_size)
    return int(max(1, min(MOST_TOKENS, NUMBERS // sums)))


def attention(
    query: torch.Tensor,
    layer: LayerCache,
    parts: PartialSoftmax,
    position: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """softmax(query @ keys * scale) @ values over the tokens up to position, int32 [sequences], the window's last ones.

    query: float32 [sequences, heads, head_size]; y: the same, or flat. Writes the new token to an int8 cache.
    """
    attend_call(query, layer, parts, position, scale, window).run()
    join_call(parts, y).run()


def attend_call(
    query: torch.Tensor,
    layer: LayerCache,
    parts: PartialSoftmax,
    position: torch.Tensor,
    scale: float,
    window: int | None,
) -> KernelCall:
    """The softmax's intermediate results, to `parts`."""
    rows, heads, head_size = query.shape
    kv_heads, capacity = layer.keys.shape[1:3]
    sharing = heads // kv_heads
    steps = (query if step is None else step for step in (layer.key_steps, layer.value_steps))
    tensors = (query, layer.fresh, layer.keys, layer.values, *steps, position, parts.sums, parts.tops)
    arguments: tuple[Argument, ...] = (*tensors, parts.totals, scale, capacity, kv_heads)
    constants = {
        "WINDOW": window or 0,
        "SHARING": sharing,
        "MEMBERS": triton.next_power_of_2(sharing),
        "HEAD": head_size,
        "PADDED": triton.next_power_of_2(head_size),
        "TOKENS": tokens_at_once(sharing, head_size),
        "INT8": layer.key_steps is not None,
    }
    return KernelCall(_attend, (rows * kv_heads, parts.tops.shape[1]), arguments, constants, WARPS)


def join_call(parts: PartialSoftmax, y: torch.Tensor) -> KernelCall:
    """What attention gives, from the softmax's parts."""
    all_heads, count, head_size = parts.sums.shape
    constants = {"HEAD": head_size, "PADDED": triton.next_power_of_2(head_size), "PARTS": count}
    return KernelCall(_join, (all_heads,), (parts.sums, parts.tops, parts.totals, y), constants, WARPS)


def examples(target: LaunchTarget) -> Iterator[Example]:
    """Of an 8B model, and of one whose heads are no power of two."""
    scenes: tuple[tuple[CacheKind, int, int, int, int | None], ...] = (
        ("bf16", 32, 8, 128, None),
        ("int8", 3, 1, 80, 4096),
    )
    for kv, heads, kv_heads, size, window in scenes:
        layer = LayerCache.empty(kv, 1, kv_heads, 8192, size, torch.device("meta"))
        query = without_memory(1, heads, size)
        parts = PartialSoftmax.of(query, layer, target)
        position = without_memory(1, dtype=torch.int32)
        call = attend_call(query, layer, parts, position, size**-0.5, window)
        shape = f"{heads} heads of {size} on {kv_heads}"
        yield Example(f"{kv} cache, {shape}", call)
        yield Example(shape, join_call(parts, query))


@triton.jit
def _attend(
    query,
    fresh,
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
    WINDOW: tl.constexpr,
    SHARING: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    INT8: tl.constexpr,
):
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
    stop = tl.minimum(start + share, now + 1)
    if INT8:
        stop = tl.minimum(stop, now)
    member = tl.arange(0, MEMBERS)
    column = tl.arange(0, PADDED)
    near = tl.arange(0, TOKENS)
    own = (head * SHARING + member)[:, None] * HEAD + column[None, :]
    own_inside = (member < SHARING)[:, None] & (column < HEAD)[None, :]
    q = tl.load(query + own[:, None, :], mask=own_inside[:, None, :], other=0.0) * scale
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
        score = tl.where((token < stop)[None, :], score, float("-inf"))
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
    if INT8:  # noqa: SIM102 - which is left out when it is compiled, and the next one is not
        if (start <= now) & (now < start + share):
            source = fresh + (row * kv_heads + head) * HEAD + column
            new_k, k_step = rounded(tl.load(source, mask=column < HEAD, other=0.0))
            new_v, v_step = rounded(tl.load(source + kv_heads * HEAD, mask=column < HEAD, other=0.0))
            place = row_start + now
            tl.store(keys + place * HEAD + column, new_k.to(tl.int8), mask=column < HEAD)
            tl.store(values + place * HEAD + column, new_v.to(tl.int8), mask=column < HEAD)
            tl.store(key_steps + place, k_step)
            tl.store(value_steps + place, v_step)
            flat = tl.load(query + own, mask=own_inside, other=0.0) * scale
            new_score = tl.sum(flat * new_k.to(tl.float32)[None, :], axis=1) * k_step
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
def _join(sums, tops, totals, y, HEAD: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    head = tl.program_id(0)
    slot = head * PARTS + tl.arange(0, PARTS)
    column = tl.arange(0, PADDED)
    inside = column < HEAD
    top = tl.load(tops + slot)
    fading = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(tl.load(totals + slot) * fading, axis=0)
    part = tl.load(sums + slot[:, None] * HEAD + column[None, :], mask=inside[None, :], other=0.0)
    mixed = tl.sum(part * fading[:, None], axis=0)
    tl.store(y + head * HEAD + column, tl.div_rn(mixed, total), mask=inside)
