"""The recipe of a 4-bit quantization: the method and the calibration text. Imports no torch."""

from dataclasses import dataclass

from optigpu.models.families import family_of


@dataclass(frozen=True)
class Calibration:
    """`samples` sequences of `length` tokens: drawn from the model itself with `seed`, or cut from a file."""

    text: str
    samples: int
    length: int
    seed: int


@dataclass(frozen=True)
class Recipe:
    """`method` is "gptq" or "awq"; `group_size` inputs of an output share a scale."""

    method: str
    group_size: int
    calibration: Calibration


def conv1d_reason(family: str) -> str | None:
    """Why GPTQModel's AWQ cannot quantize a family's linear layers, or None."""
    known = family_of(family)
    reason = f"GPTQModel's AWQ does not support the Conv1D layers of {known.title}; use gptq instead."
    return reason if known.conv1d else None
