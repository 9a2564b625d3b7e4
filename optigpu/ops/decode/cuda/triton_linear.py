"""Linear layers for the few rows of a decode step, in Triton, with the norm before them and what follows fused in.

A program keeps its rows' activations in registers, normed and quantized once, and lets tiles of outputs stream past
(ops/launch.py says how many). The next tile is on its way while one is computed with.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from optigpu.ops.activation.triton_activation import activated
from optigpu.ops.decode.cuda.packing import numbers_shape
from optigpu.ops.decode.cuda.triton_products import activations, in_units, products, weights
from optigpu.ops.decode.program import FEW_BITS, UNEVEN, Activation, Matrix, Norm, WeightKind
from optigpu.ops.kernel import Argument, Example, KernelCall, without_memory
from optigpu.ops.launch import LEAST_INPUTS, Launch, LaunchTarget, divided, padded

_UNIT_BYTES = {"w3k": 16, "w4": 16, "w4k": 16, "w8": 32, "bf16": 64}
"""Bytes of LEAST_INPUTS inputs of an output; w3k has 12, and tiles of the same shape as w4, which is a power of two."""

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
) -> KernelCall:
    """y = linear(norm(x)), or activation of that, or with a gate activation(gate's) * that; added to y, or times y.

    x: float32 [rows, inputs]; y: float32 [rows, outputs]; both contiguous. The gate has the matrix's shape and kind.
    """
    rows = x.shape[0]
    launch = launch_of(matrix, matrix.outputs, rows, target, 2 if gate else 1)
    # The kernel never reads an absent tensor, but needs a pointer.
    arguments: list[Argument] = [x, *norm_arguments(norm, x), *matrix_arguments(matrix, x)]
    arguments += [*matrix_arguments(gate or matrix, x), y, *((best.value, best.index) if best else (x, x))]
    arguments += [rows, matrix.outputs]
    constants = matrix_flags(matrix, target) | norm_flags(norm)
    constants |= {
        "GATED": gate is not None,
        "GATE_BIAS": gate is not None and gate.bias is not None,
        "ACTIVATION": activation or "none",
        "INTO": into,
        "BEST": best is not None,
        "ROWS": launch.rows,
        "TILE": launch.tile,
    }
    return KernelCall(linear_kernel, launch.grid, tuple(arguments), constants, launch.warps)


def best_of(matrix: Matrix, rows: int, target: LaunchTarget) -> Best:
    """Room for what `linear_call` finds with `best`."""
    shape = (rows, launch_of(matrix, matrix.outputs, rows, target).programs)
    device = matrix.numbers.device
    return Best(torch.zeros(shape, device=device), torch.zeros(shape, device=device, dtype=torch.int32))


def examples(target: LaunchTarget) -> Iterator[Example]:
    """The products of an 8B model and of GPT-2."""
    rms, layer = norm_without_memory("rms", 4096), norm_without_memory("layer", 768)
    kinds: tuple[WeightKind, ...] = ("w3k", "w4", "w4k", "w8", "bf16")
    for kind in kinds:
        gated = matrix_without_memory(kind, 6144, 4096)
        call = linear_call(*_operands(gated, 1), target, norm=rms, gate=gated, activation="silu")
        yield Example(f"{kind}, gate and up of 4096 to 6144", call, spilled_bytes=4 if kind == "w3k" else 0)
    for kind in FEW_BITS:
        down = matrix_without_memory(kind, 4096, 14336)
        yield Example(f"{kind}, 14336 to 4096, added", linear_call(*_operands(down, 1), target, into="add"))
    for kind in UNEVEN:
        up = matrix_without_memory(kind, 3072, 768, bias=True)
        yield Example(f"{kind}, 768 to 3072, 4 rows", linear_call(*_operands(up, 4), target, norm=layer))
    head = matrix_without_memory("w8", 128256, 4096)
    call = linear_call(*_operands(head, 1), target, norm=rms, best=best_of(head, 1, target))
    yield Example("w8, head of 4096 to 128256", call)
    up = matrix_without_memory("w8", 3072, 768, bias=True)
    call = linear_call(*_operands(up, 4), target, norm=layer, activation="gelu_tanh")
    yield Example("w8, 768 to 3072, 4 rows", call)
    down = matrix_without_memory("bf16", 768, 3072, bias=True)
    call = linear_call(*_operands(down, 2), target, into="times")
    yield Example("bf16, 3072 to 768, 2 rows, times", call)


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
    rows,
    outputs,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    DP4A: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTO: tl.constexpr,
    BEST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) * TILE
    ahead = tl.num_programs(0) * TILE
    output = start + tl.arange(0, TILE)
    w1, w2, w3 = weights(numbers, scale, output, outputs, KIND, GROUP, INPUTS, PADDED)
    g1, g2, g3 = w1, w2, w3
    if GATED:
        g1, g2, g3 = weights(gate_numbers, gate_scale, output, outputs, KIND, GROUP, INPUTS, PADDED)
    x1, x2, x3 = activations(
        x, norm_weight, norm_bias, epsilon, row, rows, KIND, GROUP, INPUTS, PADDED, NORM, NORM_BIAS
    )
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    top_output = tl.zeros((ROWS,), tl.int32)
    not_finite = tl.zeros((ROWS,), tl.int32)
    for place in range(start, outputs, ahead):
        output = place + tl.arange(0, TILE)
        # Asked for before this tile's are used.
        n1, n2, n3 = weights(numbers, scale, output + ahead, outputs, KIND, GROUP, INPUTS, PADDED)
        m1, m2, m3 = n1, n2, n3
        if GATED:
            m1, m2, m3 = weights(
                gate_numbers, gate_scale, output + ahead, outputs, KIND, GROUP, INPUTS, PADDED
            )
        inside = (row < rows)[:, None] & (output < outputs)[None, :]
        to = y + row.to(tl.int64)[:, None] * outputs + output[None, :]
        result = in_units(products(w1, w2, w3, x1, x2, x3, KIND, DP4A), unit, output, outputs, KIND)
        if BIAS:
            result += tl.load(bias + output, mask=output < outputs, other=0.0)[None, :]
        if GATED:
            gate = in_units(products(g1, g2, g3, x1, x2, x3, KIND, DP4A), gate_unit, output, outputs, KIND)
            if GATE_BIAS:
                gate += tl.load(gate_bias + output, mask=output < outputs, other=0.0)[None, :]
            result *= activated(gate, ACTIVATION)
        else:
            result = activated(result, ACTIVATION)
        if INTO == "add":
            result += tl.load(to, mask=inside, other=0.0)
        elif INTO == "times":
            result *= tl.load(to, mask=inside, other=0.0)
        tl.store(to, result, mask=inside)
        if BEST:
            seen = tl.where(inside, result, float("-inf"))
            here = tl.max(seen, axis=1)
            # Of equal ones the first, there and here.
            first = tl.min(tl.where(seen == here[:, None], output[None, :], outputs), axis=1)
            top_output = tl.where(here > top, first, top_output)
            top = tl.maximum(top, here)
            not_finite += tl.sum((inside & ~(tl.abs(result) < float("inf"))).to(tl.int32), axis=1)
        w1, w2, w3 = n1, n2, n3
        g1, g2, g3 = m1, m2, m3
    if BEST:
        place = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(best_value + place, tl.where(not_finite > 0, float("nan"), top), mask=row < rows)
        tl.store(best_index + place, top_output, mask=row < rows)
