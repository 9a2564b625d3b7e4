"""The recipe of a 4-bit quantization: the method and the calibration text. Imports no torch."""

from dataclasses import dataclass

from optigpu.models.families import family_of
from optigpu.quality.text import FILE_PREFIX, SELF_WRITTEN, check_name


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


def check_text(text: str) -> str:
    """The name itself. Raises ValueError for a text that cannot be used for calibration.

    The datasets that quality is measured on are refused: a model that was calibrated on them would look better than it
    is.
    """
    if text != SELF_WRITTEN and not text.startswith(FILE_PREFIX):
        raise ValueError(f"calibration must be {SELF_WRITTEN} or {FILE_PREFIX}NAME, not {text!r}")
    return check_name(text)


def conv1d_reason(family: str) -> str | None:
    """Why GPTQModel's AWQ cannot quantize a family's linear layers, or None."""
    known = family_of(family)
    if not known.conv1d:
        return None
    return f"GPTQModel's AWQ does not support the Conv1D layers of {known.title}; use gptq instead."
