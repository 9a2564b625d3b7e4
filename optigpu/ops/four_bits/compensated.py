"""4-bit weights whose rounding errors compensate each other on a layer's calibration inputs.

    known = compensation(moment)                         # once for a layer's inputs
    weights = compensated_groups(weight, known, Int4Scheme(), scale_units(weight, 8))

GPTQ (Frantar et al., 2022, arXiv:2210.17323): inputs are rounded one after the other, and the later ones are changed to
reduce the error in the outputs. With the upper factor R of the moment R RT, the error of the outputs is the size of E R
for errors E of the weights: what a group makes up for is one product (Chen et al., 2025, arXiv:2507.18553). The scales
of a group are searched after the changes by all earlier groups.

Then numbers and scales are improved by coordinate descent on the squared error of the layer's outputs: each is set to
its best value while all others are fixed (QuantEase, Behdin et al., 2023, arXiv:2309.01885, does so for the numbers).
As rows the inputs are contiguous, and so all matrices of this are [size, outputs].
"""

from typing import NamedTuple

import torch

from optigpu.ops.four_bits.few_bits import Coupling, few_bits_reason, round_groups
from optigpu.ops.four_bits.grid import Grid, grid_of
from optigpu.ops.four_bits.quantize import quantize_groups, rounded_scale, rounding_of
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.operands import is_finite, named

DAMPING, SHRINKAGE = 0.003, 0.4
"""Corrections for the few samples: the share of the mean second moment that is added to each input's own, and the share
by which that grows, which weakens the correlations between inputs, as Ledoit and Wolf (2004) do. GPTQ adds 0.01 of the
mean alone, of which a few inputs of a large model hold the most. With a share of 0.4 instead of 0.1 SmolLM2-135M
diverges by 5% less from two thirds of the text (decision 71)."""
BLOCK = 64
"""Inputs whose factor is made at once: what they owe to all others is one product. 256 took half as long again for
1,536 inputs, twice as long for 576, and as long for 4,096."""


class Compensation(NamedTuple):
    """Statistics of a layer's inputs, float32 [inputs, inputs] each.

    moment: their second moments in units of the mean one, damped; factor: the transpose of the upper R with R RT =
    moment. rough_moment, rough_factor: the same, in the type in which they are multiplied with errors.
    """

    moment: torch.Tensor
    factor: torch.Tensor
    rough_moment: torch.Tensor
    rough_factor: torch.Tensor


def compensation(
    moment: torch.Tensor, products: torch.dtype = torch.float32, shrinkage: float = SHRINKAGE
) -> Compensation:
    """From the sum over samples of x xT, float32 [inputs, inputs].

    `products` is the type in which the C++ operator multiplies errors with it; torch does in float32. Inputs that are
    always zero are allowed. Raises ValueError if it is not a finite square matrix.
    """
    if moment.dim() != 2 or moment.shape[0] != moment.shape[1] or not is_finite(moment):
        raise ValueError(f"compensation needs a finite square matrix, not {named(moment)}.")
    size = moment.diagonal().mean()
    damped = moment / size if bool(size > 0) else torch.zeros_like(moment)
    damped.diagonal().mul_(1 + shrinkage).add_(DAMPING)
    factor = _factor(damped)
    return Compensation(damped, factor, damped.to(products), factor.to(products))


def share_left(moment: torch.Tensor) -> float:
    """The share of the squared error of a layer's outputs that GPTQ leaves of plain rounding's, from the sum of x xT.

    What is left of an input's error has the size of its own entry in the factor. Descent leaves up to half of that.
    """
    known = compensation(moment, shrinkage=0)
    return float(known.factor.diagonal().square().sum() / known.moment.diagonal().sum())


def _factor(moment: torch.Tensor) -> torch.Tensor:
    """The transpose of the upper R with R RT = moment, by Cholesky from the last input to the first, in blocks."""
    found = torch.zeros_like(moment)
    for start in reversed(range(0, len(moment), BLOCK)):
        block, later = slice(start, start + BLOCK), slice(start + BLOCK, None)
        left = moment[block, : start + BLOCK]
        left = left.addmm(found[later, block].T, found[later, : start + BLOCK], alpha=-1)
        upper = torch.linalg.cholesky(left[:, start:].flip(0, 1)).flip(0, 1)
        found[block, block] = upper.T
        torch.mm(_inverse(upper), left[:, :start], out=found[block, :start])
    return found


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    one = torch.eye(upper.shape[-1], device=upper.device).expand_as(upper)
    found: torch.Tensor = torch.linalg.solve_triangular(upper, one, upper=True)
    return found


def compensated_groups(
    weight: torch.Tensor, known: Compensation, scheme: Int4Scheme, unit: torch.Tensor
) -> Int4Weights:
    """The 4-bit numbers and scales of a weight, floating point [outputs, inputs], for inputs of that `compensation`.

    Scales are multiples of `unit`, bfloat16 [outputs]. Raises what `quantize_groups` does, and ValueError for a scheme
    with offsets or the compensation of other inputs.
    """
    factor = known.factor
    if not scheme.symmetric or factor.shape != (weight.shape[1], weight.shape[1]):
        raise ValueError(
            f"compensated_groups needs a symmetric scheme and a compensation of {weight.shape[1]} inputs."
        )
    with torch.no_grad():
        if weight.is_cpu and few_bits_reason() is None:
            return _by_operator(weight, known, scheme, unit)
        begun = _rounded(weight.float().T.contiguous(), known, scheme, unit)
        return improved_groups(weight.float(), known, begun, unit, grid_of(scheme, weight.device))


def _by_operator(
    weight: torch.Tensor, known: Compensation, scheme: Int4Scheme, unit: torch.Tensor
) -> Int4Weights:
    coupling = Coupling(
        known.rough_moment,
        known.rough_factor,
        own=_diagonal(known.moment, scheme.group_size),
        inverse=_inverses(known, scheme.group_size),
    )
    how = rounding_of(scheme, ROUNDS)
    numbers, scale = round_groups(weight.float().contiguous(), unit.float(), how, coupling)
    return Int4Weights(numbers, scale, None)


def _diagonal(square: torch.Tensor, size: int) -> torch.Tensor:
    """The squares on the diagonal, [groups, size, size]."""
    return torch.stack([square[at : at + size, at : at + size] for at in range(0, len(square), size)])


def _inverses(known: Compensation, size: int) -> torch.Tensor:
    """Of the upper factor's squares on the diagonal, contiguous [groups, size, size]."""
    return _inverse(_diagonal(known.factor, size).mT).contiguous()


def _rounded(w: torch.Tensor, known: Compensation, scheme: Int4Scheme, unit: torch.Tensor) -> Int4Weights:
    """By GPTQ. w: float32 [inputs, outputs]."""
    grid, units = grid_of(scheme, w.device), unit.float()
    errors, inverses = torch.empty_like(w), _inverses(known, scheme.group_size)
    parts: list[Int4Weights] = []
    for start, inverse in zip(range(0, w.shape[0], scheme.group_size), inverses, strict=True):
        group = slice(start, start + scheme.group_size)
        left = torch.addmm(w[group], inverse.T, known.factor[group, :start] @ errors[:start])
        found = quantize_groups(left.T.contiguous(), scheme, unit)
        scale, moved = found.scale[:, 0] * units, grid.moved(found.scale[:, 0])
        values = torch.empty_like(left)
        for index in range(len(left)):  # later inputs take back what they can of each error
            grid.nearest_(torch.div(left[index], scale, out=values[index]).sub_(moved)).add_(moved)
            wrong = (left[index] - values[index] * scale).div_(inverse[index, index])
            left[index + 1 :].addr_(inverse[index, index + 1 :], wrong, alpha=-1)
        errors[group] = w[group] - values * scale
        parts.append(Int4Weights(grid.numbers(values - moved).T, found.scale, None))
    return Int4Weights(
        torch.cat([part.q for part in parts], 1), torch.cat([part.scale for part in parts], 1), None
    )


ROUNDS = 2
"""Four rounds reduced the divergence of bundled:tiny by another fiftieth."""


class _Fit(NamedTuple):
    """weight, float32 [inputs, outputs]; q: the numbers' values, like it; scale [groups, outputs]; errors: of the
    weights, like `weight`. The last three are changed in place.
    """

    weight: torch.Tensor
    q: torch.Tensor
    scale: torch.Tensor
    errors: torch.Tensor


def improved_groups(
    weight: torch.Tensor, known: Compensation, start: Int4Weights, unit: torch.Tensor, grid: Grid
) -> Int4Weights:
    """Numbers and scales of the same kind as `start`'s, with a smaller squared error of the layer's outputs.

    weight: float32 [outputs, inputs]; start: symmetric, with scales in the `unit`, bfloat16 [outputs].
    """
    units = unit.float()
    w, multiple = weight.T.contiguous(), start.scale.T
    size = len(w) // len(multiple)
    q = grid.values(start.q.T.contiguous()) + grid.moved(multiple).repeat_interleave(size, dim=0)
    scale = multiple * units
    with torch.no_grad():
        errors = w - q * scale.repeat_interleave(size, dim=0)
        fit = _Fit(w, q, scale, errors)
        for _ in range(ROUNDS):
            for group in range(len(scale)):
                _improve(fit, group, known, units, grid)
    multiple = (scale / units).round()
    numbers = grid.numbers(q - grid.moved(multiple).repeat_interleave(size, dim=0))
    return Int4Weights(numbers.T.contiguous(), multiple.to(torch.int8).T.contiguous(), None)


def _improve(fit: _Fit, group: int, known: Compensation, units: torch.Tensor, grid: Grid) -> None:
    """Improves a group's scale for each output by least squares, then its numbers. A grid stays moved, or not."""
    size = len(fit.q) // len(fit.scale)
    inputs = slice(group * size, (group + 1) * size)
    own, before, old = known.moment[inputs, inputs], fit.q[inputs], fit.scale[group]
    # Half of what the loss falls by when a weight grows a bit: of the errors as all other groups have left them.
    pull = known.moment[inputs] @ fit.errors
    multiple = (old / units).round()
    square = (own @ before).mul_(before).sum(dim=0)
    better = old + (pull * before).sum(dim=0) / square
    scale = rounded_scale(torch.where(square > 0, better, old), units, grid.parity(multiple))
    pull.addmm_(own, before * (old - scale))
    moved, values = grid.moved(multiple), torch.empty_like(before)
    for index in range(size):
        torch.addcdiv(before[index], pull[index], own[index, index] * scale, out=values[index])
        grid.nearest_(values[index].sub_(moved)).add_(moved)
        change = (values[index] - before[index]).mul_(scale)
        pull[index + 1 :].addr_(own[index, index + 1 :], change, alpha=-1)
    fit.errors[inputs] = fit.weight[inputs] - values * scale
    fit.q[inputs], fit.scale[group] = values, scale
