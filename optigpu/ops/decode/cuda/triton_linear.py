"""Linear layers for the few rows of a decode step, in Triton, with the norm before them and what follows fused in.

A program keeps its rows' activations in registers, normed and quantized once, and lets outputs stream past: its threads
share the inputs of a tile of outputs, so that sums are split over them and no second pass adds anything up. The next
tile is on its way while one is computed with, and the first one while the activations are made ready.

Imported only where a GPU is used, because it loads Triton.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from optigpu.ops.activation.triton_activation import activated
from optigpu.ops.decode.cuda.triton_products import activations, in_units, products, weights
from optigpu.ops.decode.program import Activation, Matrix, Norm

MOST_ROWS, MOST_NUMBERS = 4, 64
"""Rows of a program, and how many of their activations a thread may have: ptxas spills registers beyond.

Further rows are other programs', which read the weights again, at best from the L2 cache.
"""
LOADS = 4
"""16-byte loads of weights that each thread has on the way at least."""
TILE_AIM = 4
"""Outputs of a tile, where the inputs are few enough: after each tile the threads wait for each other to add up."""
MOST_WARPS = 16
WARPS_A_MULTIPROCESSOR = 16
"""512 threads with LOADS loads are 32 KiB on the way; 4.3 TB/s for 0.8 us, over 132 multiprocessors, are 26 KiB."""
INTERPRETED_WARPS, INTERPRETED_LOADS = 2, 64
"""Without a GPU: few programs and large tiles, because each operation of the interpreter costs the same."""
_UNIT_BYTES = {"w4": 16, "w8": 32, "bf16": 64}
"""Bytes of 32 inputs of an output."""
_LEAST_INPUTS = 32

Into = Literal["store", "add", "times"]
"""How the result is combined with the output's current values."""


@dataclass(frozen=True)
class LaunchTarget:
    """`warps` that run at once, among which work is divided, and the 16-byte `loads` that their threads make together.

    `dp4a`: whether int8 products may be that instruction.
    """

    warps: int
    dp4a: bool
    loads: int = LOADS

    @staticmethod
    def of(device: torch.device) -> "LaunchTarget":
        """For a CUDA device, or for the CPU with Triton's interpreter."""
        if device.type != "cuda":
            return LaunchTarget(INTERPRETED_WARPS, dp4a=False, loads=INTERPRETED_LOADS)
        count: int = torch.cuda.get_device_properties(device).multi_processor_count
        return LaunchTarget(
            count * WARPS_A_MULTIPROCESSOR, dp4a=torch.cuda.get_device_capability(device) >= (6, 1)
        )


@dataclass(frozen=True)
class Launch:
    """`tile` outputs at a time of each of the streams of weights that a program reads, by `warps` warps."""

    tile: int
    warps: int
    programs: int
    rows: int
    row_programs: int

    @property
    def grid(self) -> tuple[int, int]:
        """Over outputs and over rows."""
        return self.programs, self.row_programs


def launch_of(matrix: Matrix, outputs: int, rows: int, target: LaunchTarget, streams: int = 1) -> Launch:
    """How a product is divided; `outputs` are those of one stream. Each thread has the target's loads on the way."""
    output_bytes = padded_inputs(matrix) // _LEAST_INPUTS * _UNIT_BYTES[matrix.kind]
    warp_bytes = 32 * 16 * target.loads
    warps = min(MOST_WARPS, max(1, TILE_AIM * output_bytes // warp_bytes))
    tile = max(1, warps * warp_bytes // output_bytes // streams)
    row_numbers = padded_inputs(matrix) // (32 * warps)
    together = min(MOST_ROWS, triton.next_power_of_2(rows), max(1, MOST_NUMBERS // max(1, row_numbers)))
    programs = min(triton.cdiv(outputs, tile), max(1, target.warps // warps))
    return Launch(tile, warps, programs, together, triton.cdiv(rows, together))


def padded_inputs(matrix: Matrix) -> int:
    """The power of two that a tile has for a matrix's inputs."""
    return int(max(_LEAST_INPUTS, triton.next_power_of_2(matrix.inputs)))


def matrix_flags(matrix: Matrix, target: LaunchTarget) -> dict[str, str | int]:
    """The compile-time arguments of a matrix."""
    return {
        "KIND": matrix.kind,
        "GROUP": matrix.group,
        "INPUTS": matrix.inputs,
        "PADDED": padded_inputs(matrix),
        "BIAS": matrix.bias is not None,
        "DP4A": target.dp4a,
    }


def norm_flags(norm: Norm | None) -> dict[str, str | bool]:
    """The compile-time arguments of a norm."""
    return {
        "NORM": norm.kind if norm else "none",
        "NORM_BIAS": norm is not None and norm.bias is not None,
    }


@dataclass(frozen=True)
class Best:
    """The largest logit that each program saw and which it was, float32 and int32 [rows, programs].

    NaN for a program that saw one that is not finite.
    """

    value: torch.Tensor
    index: torch.Tensor


def linear(
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
) -> None:
    """y = linear(norm(x)), or activation of that, or with a gate activation(gate's) * that; added to y, or times y.

    x: float32 [rows, inputs]; y: float32 [rows, outputs]; both contiguous. The gate has the matrix's shape and kind.
    """
    rows = x.shape[0]
    launch = launch_of(matrix, matrix.outputs, rows, target, 2 if gate else 1)
    # The kernel never reads an absent tensor, but needs a pointer.
    _linear[launch.grid](
        x,
        *norm_arguments(norm, x),
        *matrix_arguments(matrix, x),
        *matrix_arguments(gate or matrix, x),
        y,
        best.value if best else x,
        best.index if best else x,
        rows,
        matrix.outputs,
        **matrix_flags(matrix, target),
        **norm_flags(norm),
        GATED=gate is not None,
        GATE_BIAS=gate is not None and gate.bias is not None,
        ACTIVATION=activation or "none",
        INTO=into,
        BEST=best is not None,
        ROWS=launch.rows,
        TILE=launch.tile,
        num_warps=launch.warps,
    )


def best_of(matrix: Matrix, rows: int, target: LaunchTarget) -> Best:
    """Room for what `linear` finds with `best`."""
    shape = (rows, launch_of(matrix, matrix.outputs, rows, target).programs)
    device = matrix.numbers.device
    return Best(torch.zeros(shape, device=device), torch.zeros(shape, device=device, dtype=torch.int32))


def matrix_arguments(matrix: Matrix, instead: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of a matrix."""
    return (
        matrix.numbers,
        instead if matrix.scale is None else matrix.scale,
        instead if matrix.unit is None else matrix.unit,
        instead if matrix.bias is None else matrix.bias,
    )


def norm_arguments(norm: Norm | None, instead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The tensors and the epsilon of a norm."""
    if norm is None:
        return instead, instead, 0.0
    return norm.weight, instead if norm.bias is None else norm.bias, norm.epsilon


@triton.jit
def _linear(
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
