"""The recipe of a 4-bit quantization: the method and the calibration text. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from optigpu.models.families import family_of
from optigpu.quality.text import FILE_PREFIX, SELF_WRITTEN, check_name
from optigpu.vocabulary import Frozen


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


class RecipeParameters(Frozen):
    """The parameters of a technique that quantizes by one of GPTQModel's methods."""

    bits: Literal[4] = 4
    group_size: Literal[32, 64, 128] = 32
    calibration: str = Field("self", max_length=200)
    samples: int = Field(32, ge=1, le=1024)
    length: int = Field(128, ge=2, le=8192)
    seed: int = Field(0, ge=0, lt=2**63)

    @field_validator("calibration")
    @classmethod
    def _is_a_text(cls, calibration: str) -> str:
        """Refuses the datasets that quality is measured on: a model calibrated on them would look better than it is."""
        if calibration != SELF_WRITTEN and not calibration.startswith(FILE_PREFIX):
            raise ValueError(f"calibration must be {SELF_WRITTEN} or {FILE_PREFIX}NAME, not {calibration!r}")
        return check_name(calibration)

    def recipe(self, method: str) -> Recipe:
        text = Calibration(self.calibration, self.samples, self.length, self.seed)
        return Recipe(method, self.group_size, text)


def conv1d_reason(family: str) -> str | None:
    """Why GPTQModel's AWQ cannot quantize a family's linear layers, or None."""
    known = family_of(family)
    reason = f"GPTQModel's AWQ does not support the Conv1D layers of {known.title}; use gptq instead."
    return reason if known.conv1d else None
