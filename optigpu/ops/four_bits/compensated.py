"""4-bit weights whose rounding errors compensate each other on a layer's calibration inputs.

    known = compensation(moment)                         # once for a layer's inputs
    weights = compensated_groups(weight, known, Int4Scheme(), scale_units(weight, 8))

GPTQ (Frantar et al., 2022, arXiv:2210.17323): inputs are rounded one after the other, and the later ones are changed to
reduce the error in the outputs, as far as the inputs' second moments allow. The scales of a group are searched after
the changes by all earlier groups. Then all are improved one at a time (descent.py).
"""

from typing import NamedTuple

import torch

from optigpu.ops.four_bits.descent import improved_groups
from optigpu.ops.four_bits.grid import Grid, grid_of
from optigpu.ops.four_bits.quantize import quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.naming import named

DAMPING = 0.01
"""Share of the mean second moment that is added to each, for what few samples do not tell; the paper's."""
LARGEST_AT_ONCE = 128
"""Inputs up to which a triangular matrix is inverted by the library at once."""


class Compensation(NamedTuple):
    """Statistics of a layer's inputs, float32 [inputs, inputs] each.

    moment: their second moments in units of the mean one, damped; factor: the upper Cholesky factor of the inverse.
    """

    moment: torch.Tensor
    factor: torch.Tensor


def compensation(moment: torch.Tensor) -> Compensation:
    """From the sum over samples of x xT, float32 [inputs, inputs].

    Inputs that are always zero are allowed. Raises ValueError if it is not a finite square matrix.
    """
    if moment.dim() != 2 or moment.shape[0] != moment.shape[1] or not bool(moment.isfinite().all()):
        raise ValueError(f"compensation needs a finite square matrix, not {named(moment)}.")
    size = moment.diagonal().mean()
    damped = moment / size if bool(size > 0) else torch.zeros_like(moment)
    damped.diagonal().add_(DAMPING)
    # From the last input to the first: the moment is then R RT with an upper R, and its inverse UT U with U = 1 / R.
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return Compensation(damped, _inverse(upper))


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    """Of an upper triangular matrix, by halves: nearly all of it is products of large matrices."""
    size = upper.shape[0]
    found: torch.Tensor
    if size <= LARGEST_AT_ONCE:
        one = torch.eye(size, dtype=upper.dtype, device=upper.device)
        found = torch.linalg.solve_triangular(upper, one, upper=True)
        return found
    found = torch.zeros_like(upper)
    first, last = slice(0, size // 2), slice(size // 2, size)
    found[first, first], found[last, last] = _inverse(upper[first, first]), _inverse(upper[last, last])
    found[first, last] = found[first, first] @ upper[first, last] @ found[last, last].neg()
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
    left, size, grid = weight.float().clone(), scheme.group_size, grid_of(scheme, weight.device)
    parts: list[Int4Weights] = []
    with torch.no_grad():
        for start in range(0, left.shape[1], size):
            group = slice(start, start + size)
            found = quantize_groups(left[:, group].contiguous(), scheme, unit)
            scale = found.scale * unit.float().unsqueeze(1)
            q, errors = _rounded(left[:, group], scale, factor[group, group], grid)
            left[:, group.stop :].addmm_(errors, factor[group, group.stop :], alpha=-1)
            parts.append(Int4Weights(q, found.scale, None))
    begun = Int4Weights(
        torch.cat([part.q for part in parts], 1), torch.cat([part.scale for part in parts], 1), None
    )
    return improved_groups(weight.float(), known.moment, begun, unit, grid)


def _rounded(
    group: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """A group's numbers, uint8 [outputs, size], and what its later inputs have not taken back of each error.

    group: float32 [outputs, size], in which the errors are taken back; scale: float32 [outputs, 1].
    """
    # One input after the other: as rows they are contiguous.
    columns, step = group.T.contiguous(), scale.T.contiguous()[0]
    values, errors = torch.empty_like(columns), torch.empty_like(columns)
    for index in range(columns.shape[0]):
        grid.nearest_(torch.div(columns[index], step, out=values[index]))
        torch.sub(columns[index], values[index] * step, out=errors[index]).div_(factor[index, index])
        columns[index + 1 :].addr_(factor[index, index + 1 :], errors[index], alpha=-1)
    return grid.numbers(values).T, errors.T
