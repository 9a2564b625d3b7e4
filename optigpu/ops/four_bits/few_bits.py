"""What packing weights in few bits does many times with each of them, by C++ operators (few_bits.cpp).

    reason = few_bits_reason()                    # None where they can be used: on a CPU with a compiler
    losses = uneven_errors(groups, scale, values).sum(dim=1)

`uneven_errors` and `uneven_numbers` give the very bits that torch's operators give.
"""

import functools
from pathlib import Path
from typing import Literal

import torch

from optigpu.ops.build import load_library
from optigpu.ops.native import NativeOperators

FewBitsBackend = Literal["native-avx512", "native-avx2", "native-portable"]

BEST_INSTRUCTION_SET = 0
"""The operators' number for the newest instruction set that the CPU has."""
FEW_BITS_INSTRUCTION_SETS: dict[FewBitsBackend, int] = {
    "native-portable": 1,
    "native-avx2": 2,
    "native-avx512": 3,
}
"""The operators' numbers; the enumeration InstructionSet in few_bits.cpp."""
_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / name for name in ("few_bits.cpp", "few_bits.h", "moments.h"))


def few_bits_reason() -> str | None:
    """Why the operators cannot be used here, in one sentence; None where they can. Builds them when needed."""
    return _NATIVE.reason


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers with sums in float32, and the operators use that."""
    return few_bits_reason() is None and bool(load_library(_SOURCES).optigpu_few_bits_has_moments())


def product_type(device: torch.device) -> torch.dtype:
    """Of the operands of a calibration's products: bfloat16 where `multiplies_bfloat16`, which is twice as fast."""
    return torch.bfloat16 if device.type == "cpu" and multiplies_bfloat16() else torch.float32


def uneven_errors(
    weight: torch.Tensor,
    scale: torch.Tensor,
    values: torch.Tensor,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> torch.Tensor:
    """The squared errors of the nearest values, float32 [groups, size] as the weights.

    scale: float32 [groups, 1]; values: whole float32 numbers in ascending order, 16 at most.
    """
    found: torch.Tensor = torch.ops.optigpu.uneven_errors(weight, scale, values, instruction_set)
    return found


def uneven_numbers(
    weight: torch.Tensor,
    scale: torch.Tensor,
    values: torch.Tensor,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> torch.Tensor:
    """Which values are the nearest, uint8 [groups, size]; all else as in `uneven_errors`."""
    found: torch.Tensor = torch.ops.optigpu.uneven_numbers(weight, scale, values, instruction_set)
    return found


def in_order(
    given: torch.Tensor,
    before: torch.Tensor | None,
    scale: torch.Tensor,
    coupling: torch.Tensor,
    values: torch.Tensor | None,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> torch.Tensor:
    """The values of a group's numbers, float32 [size, outputs], found for one input after the other.

    As `rounded_in_order` of in_order.py without `before`, and as `improved_in_order` with it. All are contiguous
    float32; without `values` they are evenly spaced.
    """
    found: torch.Tensor = torch.ops.optigpu.in_order(given, before, scale, coupling, values, instruction_set)
    return found


def add_moment(moment: torch.Tensor, x: torch.Tensor) -> None:
    """Adds xT x on and right of the diagonal of a moment, float32 [inputs, inputs]; left of it, some squares.

    x: contiguous bfloat16 [tokens, inputs]. Only where `multiplies_bfloat16`.
    """
    torch.ops.optigpu.add_moment(moment, x)


_NATIVE = NativeOperators(_SOURCES, "optigpu_best_few_bits_instruction_set", {}, FEW_BITS_INSTRUCTION_SETS)
