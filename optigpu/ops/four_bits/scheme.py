"""How weights of 3 to 6 bits are chosen and stored. Loads no torch: techniques import it before torch is loaded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Int4Scheme:
    """How weights become 4-bit numbers.

    group_size: how many inputs of an output share a scale; as many as there are is one scale per channel. symmetric:
    whether there are no offsets. solver: "min_max" takes the scale from a group's extremes; "hqq" then improves it:
    offsets by Half-Quadratic Quantization (Badri and Shaji, 2023, https://mobiusml.github.io/hqq_blog), symmetric
    scales by a search. table: the values that numbers stand for, which need a symmetric scheme; with 8 of
    them numbers have 3 bits. whole_bits: of numbers without a table, 4 to 6; those with offsets have 4.
    """

    group_size: int = 32
    symmetric: bool = True
    solver: Literal["min_max", "hqq"] = "hqq"
    table: tuple[int, ...] = ()
    whole_bits: int = 4

    @property
    def bits(self) -> float:
        """Bits for each weight, with its share of the scales and offsets."""
        count = len(self.table) or 2**self.whole_bits
        return count.bit_length() - 1 + (1 if self.symmetric else 2) * 16 / self.group_size

    @property
    def least(self) -> int:
        """The least of evenly spaced values; the largest is one less than as far from 0."""
        return -(1 << self.whole_bits - 1)


class Int4Weights(NamedTuple):
    """q: uint8 [outputs, inner], from 0; scale: bfloat16 [outputs, groups]; offset: the same, or None.

    Where outputs have units, a scale is an int8 number, from -127 to 127 and not 0, by which the unit is multiplied.
    """

    q: "torch.Tensor"
    scale: "torch.Tensor"
    offset: "torch.Tensor | None"


SIXTEEN = (-64, -47, -37, -29, -22, -15, -9, -3, 3, 9, 15, 22, 29, 36, 45, 56)
EIGHT = (-64, -38, -22, -8, 5, 18, 33, 53)
"""Those that leave normally distributed weights in groups of 64 the least error (docs/decisions/0050-uneven-values.md).

A group's largest weight gets the end that lies further out, whatever its sign, because a scale has a sign. With 64
added they have 7 bits, and the sum of two of their products with 8-bit activations has 16: AVX2 adds two in 16 bits.
"""
MOVED = {8: 7, 16: 3}
"""What is added to all values of a group whose scale is an odd multiple of its unit, by their count: about half a step.
So a group has the better of two grids in the same bytes."""
FURTHEST = -64
REACH = 1.1
"""How much further than a group's largest weight its scale may reach."""
