"""The scheme of 4-bit weights: how they are chosen, and how they are stored.

Loads no torch: techniques import it before torch is loaded.
"""

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
    scales by a search. table: the values that numbers stand for, of table.py, which need a symmetric scheme; with 8 of
    them numbers have 3 bits.
    """

    group_size: int = 32
    symmetric: bool = True
    solver: Literal["min_max", "hqq"] = "hqq"
    table: tuple[int, ...] = ()

    @property
    def bits(self) -> float:
        """Bits for each weight, with its share of the scales and offsets."""
        return (len(self.table) or 16).bit_length() - 1 + (1 if self.symmetric else 2) * 16 / self.group_size


class Int4Weights(NamedTuple):
    """q: uint8 [outputs, inner], from 0 to 15; scale: bfloat16 [outputs, groups]; offset: the same, or None.

    Where outputs have units, a scale is an int8 number, from -127 to 127 and not 0, by which the unit is multiplied.
    """

    q: "torch.Tensor"
    scale: "torch.Tensor"
    offset: "torch.Tensor | None"
