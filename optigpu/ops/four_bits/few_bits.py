"""What packing weights in few bits does many times with each of them, by C++ operators (few_bits.cpp).

    reason = few_bits_reason()                    # None where they can be used: on a CPU with a compiler
    losses = uneven_errors(groups, scale, values).sum(dim=1)

`uneven_errors` and `uneven_numbers` give the very bits that torch's operators give.
"""

import functools
from typing import Literal, NamedTuple

import torch

from optigpu.ops.build import BEST_INSTRUCTION_SET, NativeOperators, load_library, sources

FewBitsBackend = Literal["native-avx512-bf16", "native-avx512", "native-avx2", "native-portable"]

FEW_BITS_INSTRUCTION_SETS: dict[FewBitsBackend, int] = {
    "native-portable": 1,
    "native-avx2": 2,
    "native-avx512": 3,
    "native-avx512-bf16": 4,
}
"""The operators' numbers; the enumeration InstructionSet in few_bits.cpp."""
_SOURCES = sources(__file__, "few_bits.cpp", "few_bits.h", "compensated.h", "moments.h")
_NATIVE = NativeOperators(_SOURCES, "optigpu_best_few_bits_instruction_set", {}, FEW_BITS_INSTRUCTION_SETS)
few_bits_reason = _NATIVE.reason


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers with sums in float32, and the operators use that."""
    return few_bits_reason() is None and bool(load_library(_SOURCES).optigpu_few_bits_has_bfloat16())


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


class Rounding(NamedTuple):
    """How `round_compensated` rounds; contiguous tensors, float32 unless it is said.

    moment: the inputs' second moments, [inputs, inputs]; factor: the transpose of the upper R with R RT = moment; both
    float32, or bfloat16 where `multiplies_bfloat16`. own: the moments of each group's inputs, [groups, size, size];
    inverse: those of R's squares on the diagonal. values: as in `uneven_errors`, or None for evenly spaced ones from
    `least` on; move: what is added to them where a scale is an odd multiple of its unit. shares: the scales that are
    tried for uneven values, in units of the largest weight. steps: of the search for scales of evenly spaced ones.
    rounds: of descent.
    """

    moment: torch.Tensor
    factor: torch.Tensor
    own: torch.Tensor
    inverse: torch.Tensor
    values: torch.Tensor | None
    move: int
    least: int
    shares: torch.Tensor
    steps: int
    rounds: int


def round_compensated(
    weight: torch.Tensor, unit: torch.Tensor, how: Rounding, instruction_set: int = BEST_INSTRUCTION_SET
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers uint8 [outputs, inputs] and scales int8 [outputs, groups], multiples of `unit`, float32 [outputs].

    weight: contiguous float32 [outputs, inputs]. What an output gets does not depend on the others.
    """
    numbers = torch.empty(weight.shape, dtype=torch.uint8)
    scale = torch.empty(weight.shape[0], len(how.own), dtype=torch.int8)
    torch.ops.optigpu.round_compensated(weight, unit, *how, numbers, scale, instruction_set)
    return numbers, scale


def add_moment(moment: torch.Tensor, x: torch.Tensor) -> None:
    """Adds xT x on and right of the diagonal of a moment, float32 [inputs, inputs]; left of it, some squares.

    x: contiguous bfloat16 [tokens, inputs]. Only where `multiplies_bfloat16`.
    """
    torch.ops.optigpu.add_moment(moment, x)
