"""Linear layers for the few rows of a decode step, in Triton, with the norm before them and what follows fused in.

A program keeps its rows' activations in registers, normed and quantized once, and lets tiles of outputs stream past
(ops/launch.py says how many). The next tile is on its way while one is computed with.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import triton
import triton.language as tl

from optigpu.ops.activation.triton_activation import activated, gated
from optigpu.ops.decode.cuda.packing import numbers_shape
from optigpu.ops.decode.cuda.triton_products import activations, capped, in_units, products, weights
from optigpu.ops.decode.program import FEW_BITS, WEIGHT_KINDS, Activation, Matrix, Norm, WeightKind
from optigpu.ops.launch import (
    LEAST_INPUTS,
    Argument,
    Example,
    KernelCall,
    Launch,
    LaunchTarget,
    divided,
    padded,
    without_memory,
)

_UNIT_BYTES = {"w3k": 16, "w4": 16, "w4k": 16, "w5": 32, "w6": 32, "w8": 32, "bf16": 64}
"""Bytes of LEAST_INPUTS inputs of an output, and up to a power of two: w3k has 12, w5 20, and w6 24."""

Into = Literal["store", "add", "times"]
"""How the result is combined with the output's current values."""


def launch_of(matrix: Matrix, outputs: int, rows: int, target: LaunchTarget, streams: int = 1) -> Launch:
    """How a product is divided; `outputs` are those of one stream."""
    output_bytes = padded(matrix.inputs) // LEAST_INPUTS * _UNIT_BYTES[matrix.kind]
    return divided(padded(matrix.inputs), output_bytes, outputs, rows, target, streams)


def matrix_flags(matrix: Matrix, target: LaunchTarget) -> dict[str, str | int]:
    return {
        "KIND": matrix.kind,
        "GROUP": matrix.group,
        "INPUTS": matrix.inputs,
        "PADDED": padded(matrix.inputs),
        "BIAS": matrix.bias is not None,
        "DP4A": target.dp4a,
    }


def norm_flags(norm: Norm | None) -> dict[str, str | int]:
    return {"NORM": norm.kind if norm else "none", "NORM_BIAS": norm is not None and norm.bias is not None}


@dataclass(frozen=True)
class Best:
    """The largest logit that each program saw and which it was, float32 and int32 [rows, programs].

    NaN for a program that saw one that is not finite.
    """

    value: torch.Tensor
    index: torch.Tensor


def linear_call(
    x: torch.Tensor,
    matrix: Matrix,
    y: torch.Tensor,
    target: LaunchTarget,
    *,
    norm: Norm | None = None,
    gate: Matrix | None = None,
    activation: Activation | None = None,
    into: Into = "store",
    best: Best | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    clamp: tuple[float, float] | None = None,
    experts: tuple[torch.Tensor, int, int] | None = None,
    chosen: torch.Tensor | None = None,
) -> KernelCall:
    """y = linear(norm(x)), or activation of that, or with a gate activation(gate's) * that; added to y, or times y.

    What is added is `factor` times as large, and y is within the `cap`. `clamp` is a mixture's, instead of an
    activation. x: float32 [rows, inputs]; y: float32 [rows, outputs]; both contiguous. The gate has the matrix's shape
    and kind.

    With `experts` row i of y is made by chosen[i], int32, of row i modulo those of x. `experts` are each one's place in
    the matrix, int32, -1 for those in another one; how many rows their outputs there are apart; and its outputs are.
    """
    rows = y.shape[0]
    if experts:  # each row has weights of its own
        target = replace(target, warps=max(1, target.warps // rows))
    launch = launch_of(matrix, matrix.outputs, 1 if experts else rows, target, 2 if gate else 1)
    # The kernel never reads an absent tensor, but needs a pointer.
    arguments: list[Argument] = [x, *norm_arguments(norm, x), *matrix_arguments(matrix, x)]
    arguments += [*matrix_arguments(gate or matrix, x), y, *((best.value, best.index) if best else (x, x))]
    places, apart, step = experts or (x, 0, 1)
    arguments += [x if chosen is None else chosen, places, apart]
    arguments += [rows, x.shape[0], matrix.outputs, factor]
    constants: dict[str, str | int | float] = {
        **matrix_flags(matrix, target),
        **norm_flags(norm),
        "EXPERTS": experts is not None,
        "STEP": step,
        "CAP": cap or 0.0,
        "ALPHA": clamp[0] if clamp else 0.0,
        "LIMIT": clamp[1] if clamp else 0.0,
        "GATED": gate is not None,
        "GATE_BIAS": gate is not None and gate.bias is not None,
        "ACTIVATION": activation or "none",
        "INTO": into,
        "BEST": best is not None,
        "ROWS": launch.rows,
        "TILE": launch.tile,
    }
    grid = (launch.programs, rows if experts else launch.row_programs)
    return KernelCall(linear_kernel, grid, tuple(arguments), constants, launch.warps)


def best_of(matrix: Matrix, rows: int, target: LaunchTarget) -> Best:
    """Room for what `linear_call` finds with `best`."""
    shape = (rows, launch_of(matrix, matrix.outputs, rows, target).programs)
    device = matrix.numbers.device
    return Best(torch.zeros(shape, device=device), torch.zeros(shape, device=device, dtype=torch.int32))


def examples(target: LaunchTarget) -> Iterator[Example]:
    """The products of an 8B model, of GPT-2, and of 8 among 128 experts."""
    rms, layer = norm_without_memory("rms", 4096), norm_without_memory("layer", 768)
    for kind in WEIGHT_KINDS:
        gated = matrix_without_memory(kind, 6144, 4096)
        call = linear_call(*_operands(gated, 1), target, norm=rms, gate=gated, activation="silu")
        yield Example(f"{kind}, gate and up of 4096 to 6144", call, spilled_bytes=4 if kind == "w3k" else 0)
    for kind in FEW_BITS:
        down = matrix_without_memory(kind, 4096, 14336)
        yield Example(f"{kind}, 14336 to 4096, added", linear_call(*_operands(down, 1), target, into="add"))
    for kind in ("w3k", "w4k", "w5", "w6"):
        up = matrix_without_memory(kind, 3072, 768, bias=True)
        call = linear_call(*_operands(up, 4), target, norm=layer)
        yield Example(f"{kind}, 768 to 3072, 4 rows", call, spilled_bytes=4 if kind == "w5" else 0)
    head = matrix_without_memory("w8", 128256, 4096)
    call = linear_call(*_operands(head, 1), target, norm=rms, best=best_of(head, 1, target))
    yield Example("w8, head of 4096 to 128256", call)
    up = matrix_without_memory("w8", 3072, 768, bias=True)
    call = linear_call(*_operands(up, 4), target, norm=layer, activation="gelu_tanh")
    yield Example("w8, 768 to 3072, 4 rows", call)
    down = matrix_without_memory("bf16", 768, 3072, bias=True)
    yield Example("bf16, 3072 to 768, 2 rows, times", linear_call(*_operands(down, 2), target, into="times"))
    chosen, places = (without_memory(count, dtype=torch.int32) for count in (8, 128))
    up = replace(matrix_without_memory("w4", 128 * 1536, 2048), outputs=768)
    x, y, norm = without_memory(1, 2048), without_memory(8, 768), norm_without_memory("rms", 2048)
    its = partial(linear_call, x, up, y, target, norm=norm, gate=up, activation="silu", chosen=chosen)
    yield Example("w4, experts' gate and up of 2048 to 768", its(experts=(places, 1536, 1)))
    paired = its(experts=(places, 1536, 2), clamp=(1.7, 7.0))
    yield Example("w4, the same in pairs with a clamp", paired)
    down = replace(matrix_without_memory("w4", 128 * 2048, 768), outputs=2048)
    call = linear_call(y, down, without_memory(8, 2048), target, experts=(places, 2048, 1), chosen=chosen)
    yield Example("w4, experts' down of 768 to 2048", call)


def _operands(matrix: Matrix, rows: int) -> tuple[torch.Tensor, Matrix, torch.Tensor]:
    return without_memory(rows, matrix.inputs), matrix, without_memory(rows, matrix.outputs)


def matrix_without_memory(kind: WeightKind, outputs: int, inputs: int, bias: bool = False) -> Matrix:
    """A matrix of an example, in groups of 32, as packing.py lays it out."""
    added = without_memory(outputs) if bias else None
    if kind == "bf16":
        numbers = without_memory(outputs, inputs, dtype=torch.bfloat16)
        return Matrix("bf16", outputs, inputs, 0, numbers, None, added)
    numbers = without_memory(*numbers_shape(kind, outputs, inputs), dtype=torch.int32)
    scale = without_memory(outputs, inputs // 32, dtype=torch.int8)
    unit = without_memory(outputs, dtype=torch.bfloat16)
    return Matrix(kind, outputs, inputs, 32, numbers, scale, added, unit)


def norm_without_memory(kind: Literal["rms", "layer"], width: int) -> Norm:
    return Norm(kind, without_memory(width), without_memory(width) if kind == "layer" else None, 1e-5)


def matrix_arguments(matrix: Matrix, instead: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of a matrix."""
    others = (instead if part is None else part for part in (matrix.scale, matrix.unit, matrix.bias))
    return (matrix.numbers, *others)


def norm_arguments(norm: Norm | None, instead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The tensors and the epsilon of a norm."""
    if norm is None:
        return instead, instead, 0.0
    return norm.weight, instead if norm.bias is None else norm.bias, norm.epsilon


@triton.jit
def linear_kernel(
    x,
    norm_weight,
    norm_bias,
    epsilon,
    numbers,
    scale,
    unit,
    bias,
    gate_numbers,
    gate_scale,
    gate_unit,
    gate_bias,
    y,
    best_value,
    best_index,
    chosen,
    places,
    apart,
    rows,
    x_rows,
    outputs,
    factor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    DP4A: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
    CAP: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTO: tl.constexpr,
    BEST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_row, begin, stop = row, 0, outputs
    if EXPERTS:
        expert = tl.load(places + tl.load(chosen + tl.program_id(1)))
        x_row, begin, stop = row % x_rows, expert * apart, tl.where(expert < 0, 0, outputs)
    end = begin + stop * STEP
    start = tl.program_id(0) * TILE
    ahead = tl.num_programs(0) * TILE
    output = begin + (start + tl.arange(0, TILE)) * STEP
    w1, w2, w3 = weights(numbers, scale, output, end, KIND, GROUP, INPUTS, PADDED)
    g1, g2, g3 = w1, w2, w3
    if GATED:
        g1, g2, g3 = weights(gate_numbers, gate_scale, output, end, KIND, GROUP, INPUTS, PADDED)
    x1, x2, x3 = activations(
        x, norm_weight, norm_bias, epsilon, x_row, rows, KIND, GROUP, INPUTS, PADDED, NORM, NORM_BIAS
    )
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    top_output = tl.zeros((ROWS,), tl.int32)
    not_finite = tl.zeros((ROWS,), tl.int32)
    for place in range(start, stop, ahead):
        column = place + tl.arange(0, TILE)
        output = begin + column * STEP
        # Asked for before this tile's are used.
        coming = output + ahead * STEP
        n1, n2, n3 = weights(numbers, scale, coming, end, KIND, GROUP, INPUTS, PADDED)
        m1, m2, m3 = n1, n2, n3
        if GATED:
            m1, m2, m3 = weights(gate_numbers, gate_scale, coming, end, KIND, GROUP, INPUTS, PADDED)
        inside = (row < rows)[:, None] & (column < stop)[None, :]
        to = y + row.to(tl.int64)[:, None] * outputs + column[None, :]
        result = in_units(products(w1, w2, w3, x1, x2, x3, KIND, DP4A), unit, output, end, KIND)
        if BIAS:
            result += tl.load(bias + output, mask=column < stop, other=0.0)[None, :]
        if GATED:
            gate = in_units(products(g1, g2, g3, x1, x2, x3, KIND, DP4A), gate_unit, output, end, KIND)
            if GATE_BIAS:
                gate += tl.load(gate_bias + output, mask=column < stop, other=0.0)[None, :]
            result = gated(gate, result, ACTIVATION, ALPHA, LIMIT)
        elif INTO == "times":
            result = gated(result, tl.load(to, mask=inside, other=0.0), ACTIVATION, ALPHA, LIMIT)
        else:
            result = activated(result, ACTIVATION)
        if INTO == "add":
            result = result * factor + tl.load(to, mask=inside, other=0.0)
        kept = capped(result, CAP)
        tl.store(to, kept, mask=inside)
        if BEST:
            seen = tl.where(inside, kept, float("-inf"))
            here = tl.max(seen, axis=1)
            # Of equal ones the first, there and here.
            first = tl.min(tl.where(seen == here[:, None], column[None, :], outputs), axis=1)
            top_output = tl.where(here > top, first, top_output)
            top = tl.maximum(top, here)
            not_finite += tl.sum((inside & ~(tl.abs(result) < float("inf"))).to(tl.int32), axis=1)
        w1, w2, w3 = n1, n2, n3
        g1, g2, g3 = m1, m2, m3
    if BEST:
        place = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(best_value + place, tl.where(not_finite > 0, float("nan"), top), mask=row < rows)
        tl.store(best_index + place, top_output, mask=row < rows)
