"""The other kernels of a decode step, besides embedding, linear layers and attention, in Triton.

`add_call` adds to the residual what is normed first, `route_call` chooses experts, and `choose_call` takes the most
likely tokens and goes on to the next position. All stays on the device, so that one recorded graph serves every step.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from optigpu.ops.decode.cuda import triton_linear as linear
from optigpu.ops.decode.cuda.state import State
from optigpu.ops.decode.cuda.triton_products import normed
from optigpu.ops.decode.program import Mixture, Norm
from optigpu.ops.launch import Example, KernelCall, LaunchTarget, without_memory


def add_call(
    y: torch.Tensor, shares: torch.Tensor | None, norm: Norm | None, x: torch.Tensor, factor: float
) -> KernelCall:
    """x += factor * norm(the sum of y, float32 [parts, rows, width], each times its share, [parts, rows], if any)."""
    rows, width = x.shape
    arguments = (y, y if shares is None else shares, *linear.norm_arguments(norm, x), x, factor, rows)
    constants = linear.norm_flags(norm)
    constants |= {"SHARES": shares is not None, "PARTS": len(y), "INPUTS": width}
    return KernelCall(add_kernel, (rows,), arguments, constants, warps=8)


def route_call(
    routed: torch.Tensor, gate: torch.Tensor | None, its: Mixture, chosen: torch.Tensor, shares: torch.Tensor
) -> KernelCall:
    """The experts of each row, int32 [parts, rows], and what each counts, float32; the shared expert's comes last.

    routed: the router's outputs, float32 [rows, experts]; gate: the shared gate's, [rows, 1].
    """
    rows, experts = routed.shape
    bias = its.choice_bias
    tensors = (routed, routed if bias is None else bias, routed if gate is None else gate, chosen, shares)
    constants = {
        "CHOSEN": its.chosen,
        "PARTS": len(shares),
        "SIGMOID": its.score == "sigmoid",
        "NORMALIZED": its.normalized,
        "BIAS": bias is not None,
        "GATED": gate is not None,
        "EXPERTS": experts,
    }
    arguments = (*tensors, rows, its.scale)
    return KernelCall(route_kernel, (rows,), arguments, constants, warps=1)


def choose_call(best: linear.Best, state: State) -> KernelCall:
    """Takes each sequence's most likely token as its next one, and advances the position."""
    rows, programs = best.value.shape
    tensors = (best.value, best.index, state.tokens, state.position, state.not_finite, state.chosen)
    arguments = (*tensors, programs, state.chosen.shape[1])
    return KernelCall(choose_kernel, (rows,), arguments, {"BLOCK": triton.next_power_of_2(programs)})


def examples(target: LaunchTarget) -> Iterator[Example]:
    """The steps of an 8B model, and of mixtures of 128 experts."""
    x, norm = without_memory(1, 4096), linear.norm_without_memory("rms", 4096)
    for parts, shares in ((1, None), (9, without_memory(9, 1))):
        yield Example(f"{parts} of 4096", add_call(without_memory(parts, 1, 4096), shares, norm, x, 1.0))
    plain = Mixture(linear.matrix_without_memory("bf16", 128, 2048), (), chosen=8)
    other = replace(plain, score="sigmoid", choice_bias=without_memory(128))
    scenes = (("softmax", plain, None), ("sigmoid with a shared expert", other, without_memory(1, 1)))
    for name, mixture, gate in scenes:
        shares = without_memory(8 if gate is None else 9, 1)
        chosen = without_memory(*shares.shape, dtype=torch.int32)
        yield Example(f"8 of 128, {name}", route_call(without_memory(1, 128), gate, mixture, chosen, shares))
    best = linear.best_of(linear.matrix_without_memory("w8", 128256, 4096), 1, target)
    yield Example("of 128256", choose_call(best, State.empty(1, 1024, torch.device("meta"))))


@triton.jit
def add_kernel(
    y,
    shares,
    norm_weight,
    norm_bias,
    epsilon,
    x,
    factor,
    rows,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    PARTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, triton.next_power_of_2(INPUTS))[None, :]
    inside = column < INPUTS
    total = tl.zeros(column.shape, tl.float32)
    for part in range(PARTS):
        value = tl.load(y + (part * rows + row) * INPUTS + column, mask=inside, other=0.0)
        if SHARES:
            value *= tl.load(shares + part * rows + row)
        total += value
    total = normed(total, norm_weight, norm_bias, epsilon, inside, INPUTS, NORM, NORM_BIAS)
    to = x + row * INPUTS + column
    tl.store(to, tl.load(to, mask=inside, other=0.0) + factor * total, mask=inside)


@triton.jit
def route_kernel(
    routed,
    choice_bias,
    gate,
    chosen,
    shares,
    rows,
    factor,
    CHOSEN: tl.constexpr,
    PARTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, triton.next_power_of_2(EXPERTS))
    inside = expert < EXPERTS
    score = tl.load(routed + row * EXPERTS + expert, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(score)
    else:
        score = tl.exp(score - tl.max(score, axis=0))
        score /= tl.sum(score, axis=0)
    wish = score
    if BIAS:
        wish += tl.load(choice_bias + expert, mask=inside, other=0.0)
    wish = tl.where(inside, wish, float("-inf"))
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    taken = tl.zeros(part.shape, tl.int32)
    share = tl.zeros(part.shape, tl.float32)
    for turn in range(CHOSEN):
        # The first of equal ones; where one is NaN, which none equals, some expert all the same.
        best = tl.min(tl.where(wish == tl.max(wish, axis=0), expert, EXPERTS - 1), axis=0)
        taken = tl.where(part == turn, best, taken)
        share = tl.where(part == turn, tl.sum(tl.where(expert == best, score, 0.0), axis=0), share)
        wish = tl.where(expert == best, float("-inf"), wish)
    if NORMALIZED:
        share /= tl.sum(share, axis=0)
    share *= factor
    whole = 1.0
    if GATED:
        whole = tl.sigmoid(tl.load(gate + row))
    share = tl.where(part == CHOSEN, whole, share)
    tl.store(chosen + part * rows + row, taken, mask=part < PARTS)
    tl.store(shares + part * rows + row, share, mask=part < PARTS)


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
