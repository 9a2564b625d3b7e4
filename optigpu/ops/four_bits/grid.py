"""What numbers stand for in units of their scale: evenly spaced values, or those of a table."""

from typing import Protocol

import torch

from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.integers import INT4_LARGEST, INT4_LEAST, INT4_ZERO


class Grid(Protocol):
    """The values of 16 numbers, or of 8."""

    def nearest_(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest values to float32 numbers, in their place."""

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        """Of such values, uint8 from 0."""

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of such numbers, float32."""


class Even:
    """A number less 8."""

    def nearest_(self, x: torch.Tensor) -> torch.Tensor:
        return x.round_().clamp_(INT4_LEAST, INT4_LARGEST)

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        return (values + INT4_ZERO).to(torch.uint8)

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.float() - INT4_ZERO


class Uneven:
    """Those of a table of table.py."""

    def __init__(self, table: tuple[int, ...], device: torch.device) -> None:
        self._values = torch.tensor(table, dtype=torch.float32, device=device)
        self._between = (self._values[1:] + self._values[:-1]) / 2

    def nearest_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._values[torch.bucketize(x, self._between)])

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(values, self._between).to(torch.uint8)

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._values[numbers.long()]


def grid_of(scheme: Int4Scheme, device: torch.device) -> Grid:
    """The grid of a scheme, on a device."""
    return Uneven(scheme.table, device) if scheme.table else Even()
