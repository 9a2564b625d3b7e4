"""4-bit weights whose rounding errors compensate each other on a layer's calibration inputs.

    known = compensation(moment)                         # once for a layer's inputs
    weights = compensated_groups(weight, known, Int4Scheme(), scale_units(weight, 8))

GPTQ (Frantar et al., 2022, arXiv:2210.17323): inputs are rounded one after the other, and the later ones are changed to
reduce the error in the outputs, as far as the inputs' second moments allow. With the upper factor R of the moment R RT,
the error of the outputs is the size of E R for errors E of the weights, of which an input's column holds no later
errors: what a group makes up for is one product, and no inverse of the moment is needed (Chen et al., 2025,
arXiv:2507.18553). The scales of a group are searched after the changes by all earlier groups. Then all are improved one
at a time (descent.py).
"""

from typing import NamedTuple

import torch

from optigpu.ops.four_bits.descent import improved_groups
from optigpu.ops.four_bits.grid import grid_of
from optigpu.ops.four_bits.in_order import rounded_in_order
from optigpu.ops.four_bits.quantize import quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.naming import named

DAMPING = 0.01
"""Share of the mean second moment that is added to each, for what few samples do not tell; the paper's."""


class Compensation(NamedTuple):
    """Statistics of a layer's inputs, float32 [inputs, inputs] each.

    moment: their second moments in units of the mean one, damped; factor: the upper R with R RT = moment.
    rough_moment, rough_factor: the same, in the type in which they are multiplied with errors.
    """

    moment: torch.Tensor
    factor: torch.Tensor
    rough_moment: torch.Tensor
    rough_factor: torch.Tensor


def compensation(moment: torch.Tensor, products: torch.dtype = torch.float32) -> Compensation:
    """From the sum over samples of x xT, float32 [inputs, inputs].

    `products` is the type in which errors are multiplied with it. Inputs that are always zero are allowed. Raises
    ValueError if it is not a finite square matrix.
    """
    if moment.dim() != 2 or moment.shape[0] != moment.shape[1] or not bool(moment.isfinite().all()):
        raise ValueError(f"compensation needs a finite square matrix, not {named(moment)}.")
    size = moment.diagonal().mean()
    damped = moment / size if bool(size > 0) else torch.zeros_like(moment)
    damped.diagonal().add_(DAMPING)
    # From the last input to the first.
    factor = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return Compensation(damped, factor, damped.to(products), factor.to(products))


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
        begun = _rounded(weight.float().T.contiguous(), known, scheme, unit)
        return improved_groups(weight.float(), known, begun, unit, grid_of(scheme, weight.device))


def _rounded(w: torch.Tensor, known: Compensation, scheme: Int4Scheme, unit: torch.Tensor) -> Int4Weights:
    """By GPTQ. w: float32 [inputs, outputs]."""
    grid, units = grid_of(scheme, w.device), unit.float()
    errors = torch.empty_like(w, dtype=known.rough_factor.dtype)
    one = torch.eye(scheme.group_size, device=w.device)
    parts: list[Int4Weights] = []
    for start in range(0, w.shape[0], scheme.group_size):
        group = slice(start, start + scheme.group_size)
        inverse = torch.linalg.solve_triangular(known.factor[group, group], one, upper=True)
        carried = (known.rough_factor[:start, group].T @ errors[:start]).float()
        left = torch.addmm(w[group], inverse.T, carried)
        found = quantize_groups(left.T.contiguous(), scheme, unit)
        scale = found.scale[:, 0] * units
        values = rounded_in_order(left, scale, inverse, grid)
        errors[group] = w[group] - values * scale
        parts.append(Int4Weights(grid.numbers(values).T, found.scale, None))
    return Int4Weights(
        torch.cat([part.q for part in parts], 1), torch.cat([part.scale for part in parts], 1), None
    )
