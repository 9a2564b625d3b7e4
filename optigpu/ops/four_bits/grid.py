"""What numbers stand for in units of their scale: evenly spaced values, or those of a table."""

import torch

from optigpu.ops.four_bits.scheme import MOVED, Int4Scheme
from optigpu.ops.operands import INT4_LEAST


class Even:
    """A number less half of how many there are: `least` is that of 0.

    table: the values, float32 and in ascending order, or None for evenly spaced ones; move: what is added to all values
    where a scale is an odd multiple of its unit.
    """

    table = None
    move = 0

    def __init__(self, least: int = INT4_LEAST) -> None:
        self.least = least

    def nearest_(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest values to float32 numbers, in their place."""
        return x.round_().clamp_(self.least, -1 - self.least)

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        """Of such values, uint8 from 0."""
        return (values - self.least).to(torch.uint8)

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of such numbers, float32."""
        return numbers.float() + self.least

    def parity(self, multiple: torch.Tensor) -> None:
        """1 where a scale is an odd multiple of its unit, else 0, float32; None where that says nothing."""

    def moved(self, multiple: torch.Tensor) -> torch.Tensor:
        """What is added to the values of groups with such scales, float32."""
        return torch.zeros_like(multiple, dtype=torch.float32)


class Uneven:
    """The values of a table, 16 or 8."""

    least = 0

    def __init__(self, table: tuple[int, ...], device: torch.device) -> None:
        self.table = torch.tensor(table, dtype=torch.float32, device=device)
        self._between = (self.table[1:] + self.table[:-1]) / 2
        self.move = MOVED[len(table)]

    def nearest_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.table[torch.bucketize(x, self._between)])

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(values, self._between).to(torch.uint8)

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.table[numbers.long()]

    def parity(self, multiple: torch.Tensor) -> torch.Tensor:
        return multiple.float().remainder(2)

    def moved(self, multiple: torch.Tensor) -> torch.Tensor:
        return self.parity(multiple).mul_(self.move)


Grid = Even | Uneven


def grid_of(scheme: Int4Scheme, device: torch.device) -> Grid:
    return Uneven(scheme.table, device) if scheme.table else Even(scheme.least)
