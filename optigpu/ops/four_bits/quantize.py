"""Quantizes weights to numbers of 3 to 6 bits in groups of inputs that share a scale.

    weights = quantize_groups(weight, Int4Scheme())
    weight is about dequantize_groups(weights) = (q - 8) * scale (+ offset), with q from 0 to 15, of 4 bits

Each group has a bfloat16 scale, and an offset of that type. Where an output has a unit, scales are multiples of it by
8-bit numbers instead; the numbers are chosen for the scale that is stored.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from optigpu.ops.four_bits.few_bits import GROUP_SIZES, Rounding, few_bits_reason, round_groups
from optigpu.ops.four_bits.grid import Even, Uneven, grid_of
from optigpu.ops.four_bits.scheme import FURTHEST, REACH, Int4Scheme, Int4Weights
from optigpu.ops.operands import INT4_LARGEST, INT4_LEAST, INT4_ZERO, INT8_LARGEST, is_finite, named

Scales = tuple[torch.Tensor, torch.Tensor]  # of groups: the scales and the offsets, float32 [groups, 1]
Found = TypeVar("Found")

AT_ONCE = {"cpu": 2**17, "cuda": 2**24}
"""Weights that are quantized together, by device. On a CPU they fit the second cache of the core that does it."""

SCALE_STEPS, OFFSET_STEPS = 3, 20
"""Steps of the solvers; the first step uses the scales of plain rounding."""
SHRINKAGE_NORM, SHRINKAGE_START, SHRINKAGE_GROWTH = 0.7, 2.0, 1.1
"""p and beta of the shrinkage for errors in units of a step. p is the paper's; the others come from bundled:tiny."""
NO_OUTLIER_ERROR = 1e-6
"""An error that is no outlier, in units of a step."""
UNEVEN_SCALES = (0.86, 0.92, 0.98, 1.04, REACH)
"""Tried for a group with uneven values, with either sign: of the scale by which its largest weight is the furthest."""
JUDGING_NORM = 3
"""Each group keeps the solver's step with the least sum of errors to this power; lower ones do worse."""


def scale_units(weight: torch.Tensor, most: int) -> torch.Tensor:
    """bfloat16 [outputs]: 1/127 of the scale by which each output's largest weight becomes `most`; never 0.

    weight: finite, floating point [outputs, inner].
    """
    unit: torch.Tensor = _rounded(weight.abs().amax(dim=1).float() / (most * INT8_LARGEST))
    return unit.masked_fill(unit == 0, 1).bfloat16()


def quantize_groups(
    weight: torch.Tensor, scheme: Int4Scheme, unit: torch.Tensor | None = None
) -> Int4Weights:
    """The 4-bit numbers and scales of a weight, floating point [outputs, inner], on its device.

    `unit`, bfloat16 [outputs], is what each output's scales are to be multiples of. Raises ValueError when the weight
    is not a finite floating-point matrix, the groups do not divide its inputs, or a scheme with offsets has a unit or
    uneven values.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"quantize_groups needs a floating-point matrix, not {named(weight)}.")
    outputs, inner = weight.shape
    if inner == 0 or inner % scheme.group_size:
        raise ValueError(f"Groups of {scheme.group_size} do not divide {inner} inputs.")
    if not is_finite(weight):
        raise ValueError("quantize_groups needs finite weights: this matrix holds NaN or infinity.")
    if scheme.table and not scheme.symmetric:
        raise ValueError("quantize_groups takes uneven values only for a symmetric scheme.")
    if unit is not None and not scheme.symmetric:
        raise ValueError(
            "quantize_groups takes a unit only for a symmetric scheme, and this scheme has offsets."
        )
    if unit is not None and weight.is_cpu and few_bits_reason() is None and scheme.group_size in GROUP_SIZES:
        numbers, scale = round_groups(weight.detach().float().contiguous(), unit.float(), rounding_of(scheme))
        return Int4Weights(numbers, scale, None)
    at_once = max(1, AT_ONCE.get(weight.device.type, AT_ONCE["cpu"]) // inner)
    units = itertools.repeat(None) if unit is None else unit.split(at_once)

    def part(
        rows: torch.Tensor, some: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            groups = rows.float().reshape(-1, scheme.group_size)
            if some is not None:
                some = some.float().repeat_interleave(inner // scheme.group_size).unsqueeze(1)
            return _quantized(groups, scheme, some)

    parts = _on_each_core(part, list(zip(weight.split(at_once), units, strict=False)))
    q, scale, offset = (torch.cat(part) for part in zip(*parts, strict=True))
    groups = (outputs, -1)
    return Int4Weights(
        q.view(outputs, inner), scale.view(groups), None if scheme.symmetric else offset.view(groups)
    )


def rounding_of(scheme: Int4Scheme, rounds: int = 0) -> Rounding:
    """What the C++ operator is told of a symmetric scheme; `rounds` are of descent."""
    grid = grid_of(scheme, torch.device("cpu"))
    return Rounding(
        scheme.group_size,
        values=grid.table,
        move=grid.move,
        least=grid.least,
        shares=torch.tensor(UNEVEN_SCALES + tuple(-share for share in UNEVEN_SCALES)) / FURTHEST,
        steps=SCALE_STEPS if scheme.solver == "hqq" else 1,
        rounds=rounds,
    )


def dequantize_groups(weights: Int4Weights) -> torch.Tensor:
    """The dequantized weights, float32, of evenly spaced values; more dimensions than [outputs, inner] are kept."""
    found: torch.Tensor = weights.q.unflatten(-1, (weights.scale.shape[-1], -1)).float().sub_(INT4_ZERO)
    found = found * weights.scale.float().unsqueeze(-1)
    if weights.offset is not None:
        found = found + weights.offset.float().unsqueeze(-1)
    return found.flatten(-2)


def _on_each_core(part: Callable[..., Found], given: Sequence[tuple[object, ...]]) -> list[Found]:
    """What a function gives for each of some arguments, by as many threads as torch has, each with one of torch's.

    Torch's own would wait for each other after each of hundreds of small operations, which takes far longer.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that begin now take that over
    try:
        if len(given) == 1:
            return [part(*given[0])]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(part, *zip(*given, strict=True)))
    finally:
        torch.set_num_threads(threads)


def _quantized(
    w: torch.Tensor, scheme: Int4Scheme, unit: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups, float32 [groups, size], to uint8 numbers, and scales and offsets [groups, 1] as they are stored.

    `unit`, float32 [groups, 1], is what scales are multiples of, or None.
    """
    if scheme.table:
        return _uneven(w, Uneven(scheme.table, w.device), unit)
    if scheme.symmetric:
        # The largest weight becomes the least value, whatever its sign, so that all numbers are used.
        largest = w.gather(1, w.abs().argmax(dim=1, keepdim=True))
        scales = rounded_scale(largest / scheme.least, unit), w.new_zeros(w.shape[0], 1)
    else:
        # From the least to the largest weight; the scale makes up for what the offset loses to bfloat16.
        least, most = w.amin(dim=1, keepdim=True), w.amax(dim=1, keepdim=True)
        offset = _rounded(least + (most - least) * (-INT4_LEAST / (INT4_LARGEST - INT4_LEAST)))
        scale = torch.maximum((most - offset) / INT4_LARGEST, (least - offset) / INT4_LEAST)
        scales = rounded_scale(scale, None), offset
    if scheme.solver == "hqq":
        scales = _solved(w, scales, unit, scheme)
    scale, offset = scales
    grid = Even(scheme.least)
    q = grid.numbers(grid.nearest_(w.sub(offset).div_(scale)))
    return q, _stored(scale, unit), offset.to(torch.bfloat16)


def _stored(scale: torch.Tensor, unit: torch.Tensor | None) -> torch.Tensor:
    return scale.to(torch.bfloat16) if unit is None else (scale / unit).round().to(torch.int8)


def _uneven(
    w: torch.Tensor, grid: Uneven, unit: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_quantized`, with the scale of those that are tried that leaves the least squared error."""
    whole = w.gather(1, w.abs().argmax(dim=1, keepdim=True)) / FURTHEST
    best, least, moved = whole, torch.full_like(whole, torch.inf), torch.zeros_like(whole)
    for odd in (None,) if unit is None else (0, 1):
        move = grid.move if odd else 0
        for share in (*UNEVEN_SCALES, *(-share for share in UNEVEN_SCALES)):
            scale = rounded_scale(whole * share, unit, odd)
            rounded = grid.nearest_((w - move * scale) / scale).add_(move).mul_(scale)
            loss = rounded.sub_(w).square_().sum(dim=1, keepdim=True)
            best, moved = torch.where(loss < least, scale, best), torch.where(loss < least, move, moved)
            least = torch.minimum(loss, least)
    numbers = grid.numbers((w - moved * best) / best)
    return numbers, _stored(best, unit), torch.zeros_like(best, dtype=torch.bfloat16)


def _solved(w: torch.Tensor, scales: Scales, unit: torch.Tensor | None, scheme: Int4Scheme) -> Scales:
    """Alternates between numbers for the scales and scales for the numbers; each group keeps the best that it had."""
    first, best, least = scales[0], scales, torch.full_like(scales[0], torch.inf)
    grid, symmetric = Even(scheme.least), scheme.symmetric
    steps = SCALE_STEPS if symmetric else OFFSET_STEPS
    for step in range(steps):
        scale, offset = scales
        q = grid.nearest_(w.sub(offset).div_(scale))
        errors = w.sub(offset).sub_(q * scale).div_(first)
        loss = errors.abs().pow_(JUDGING_NORM).sum(dim=1, keepdim=True)
        better = loss < least
        least = torch.where(better, loss, least)
        best = torch.where(better, scale, best[0]), torch.where(better, offset, best[1])
        if step + 1 < steps:
            scales = _fitted_scale(w, q, scales, unit) if symmetric else _fitted_offset(errors, step, scales)
    return best


def _fitted_scale(w: torch.Tensor, q: torch.Tensor, scales: Scales, unit: torch.Tensor | None) -> Scales:
    """The scale with which the numbers are closest to the weights, by least squares; without offsets."""
    scale = (w * q).sum(dim=1, keepdim=True) / q.square().sum(dim=1, keepdim=True)
    found_one = scale.isfinite() & (scale != 0)
    return rounded_scale(torch.where(found_one, scale, scales[0]), unit), scales[1]


def _fitted_offset(errors: torch.Tensor, step: int, scales: Scales) -> Scales:
    """Half-quadratic splitting: the errors less their outliers, which the shrinkage operator takes out, have no mean.

    The scale stays. Outliers count less and less from step to step.
    """
    scale, size = scales[0], errors.abs()
    beta = SHRINKAGE_START * SHRINKAGE_GROWTH**step
    threshold = size.clamp(min=NO_OUTLIER_ERROR).pow_(SHRINKAGE_NORM - 1).div_(beta)
    outliers = size.sub_(threshold).clamp_(min=0).copysign_(errors)
    return scale, _rounded(scales[1] + (errors - outliers).mean(dim=1, keepdim=True) * scale)


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16, as float32."""
    return numbers.to(torch.bfloat16).float()


def rounded_scale(
    scale: torch.Tensor, unit: torch.Tensor | None, odd: torch.Tensor | int | None = None
) -> torch.Tensor:
    """As it is stored: bfloat16 with 1 instead of 0, or a multiple of the unit from 1 to 127 with either sign.

    The multiple is odd or even where `odd` is 1 or 0, float32 or the same for all.
    """
    if unit is not None:
        step = 1 if odd is None else 2
        first = torch.as_tensor(0 if odd is None else odd, dtype=torch.float32, device=scale.device)
        most = INT8_LARGEST + 1 - step + first
        multiple = (((scale / unit - first) / step).round() * step + first).clamp(-most, most)
        return multiple.masked_fill(multiple == 0, step) * unit
    rounded = _rounded(scale)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
