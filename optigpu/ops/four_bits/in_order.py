"""Rounding the inputs of a group one after the other, for many outputs, by torch; compensated.h has it in C++.

As rows the inputs are contiguous, and so all matrices are [size, outputs] here.
"""

import torch

from optigpu.ops.four_bits.grid import Grid


def rounded_in_order(
    left: torch.Tensor, scale: torch.Tensor, moved: torch.Tensor, inverse: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """The values of a group's numbers; later inputs take back what they can of each error, as in GPTQ.

    left: float32 [size, outputs]; scale, and what the grid is moved by: [outputs]; inverse: of the moment's upper
    factor, [size, size].
    """
    left, values = left.clone(), torch.empty_like(left)
    for index in range(left.shape[0]):
        grid.nearest_(torch.div(left[index], scale, out=values[index]).sub_(moved)).add_(moved)
        errors = (left[index] - values[index] * scale).div_(inverse[index, index])
        left[index + 1 :].addr_(inverse[index, index + 1 :], errors, alpha=-1)
    return values


def improved_in_order(
    before: torch.Tensor,
    pull: torch.Tensor,
    scale: torch.Tensor,
    moved: torch.Tensor,
    own: torch.Tensor,
    grid: Grid,
) -> torch.Tensor:
    """The values of a group's numbers, each the best one while all others are fixed.

    before: the values that they have, float32 [size, outputs]; pull: half of what the loss falls by when a weight grows
    a bit; scale, and what the grid is moved by: [outputs]; own: the moment of the group's inputs, [size, size].
    """
    pull, values = pull.clone(), torch.empty_like(before)
    for index in range(before.shape[0]):
        torch.addcdiv(before[index], pull[index], own[index, index] * scale, out=values[index])
        grid.nearest_(values[index].sub_(moved)).add_(moved)
        change = (values[index] - before[index]).mul_(scale)
        pull[index + 1 :].addr_(own[index, index + 1 :], change, alpha=-1)
    return values
