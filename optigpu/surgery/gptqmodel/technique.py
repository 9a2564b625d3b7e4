"""What the techniques that compute with GPTQModel's 4-bit layers have in common. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from optigpu.documents.facts import ModelFacts
from optigpu.hardware.device_kinds import Ability
from optigpu.models.described import StoredWeights
from optigpu.models.families import family_of
from optigpu.ops.layouts import int4_bytes
from optigpu.quality.text import FILE_PREFIX, SELF_WRITTEN, check_name
from optigpu.surgery.extras import Package
from optigpu.techniques.base import ON_TEXT, Expected, LoadOptions, Model, Notes, WeightsTechnique
from optigpu.vocabulary import DeviceKind, Task


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


class CalibratedFourBits(WeightsTechnique):
    """Computes with the 4-bit layers of a checkpoint of its method, which is its name, or has a model quantized."""

    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.OWN_KERNELS,)
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected("arithmetic", "a sixth to a seventh of the fp32 bytes of the layers that it replaces"),
        Expected("literature", "less loss than rounding to nearest"),
        Expected("aim", "the speed of int4_weight_only"),
    )
    error_bound: ClassVar[float] = 0.5
    only_when_asked: ClassVar[bool] = True  # Quantizing takes minutes, and its loss depends on the text
    has_offsets: ClassVar[bool]
    """Whether each group of weights has an offset beside its scale."""

    name: Literal["gptq", "awq"]
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

    def packages(self, model: ModelFacts | None) -> tuple[Package, ...]:
        """Quantizing needs the extra; a model that is known before it is loaded is not a ready checkpoint."""
        return ("gptqmodel",) if model else ()

    def load(self, options: LoadOptions) -> LoadOptions:
        return options.but(packed=self.name)

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        layout = partial(
            int4_bytes, device=device, group=self.group_size, offsets=self.has_offsets, half=weights.half
        )
        return weights.with_bytes(layout, head=False)

    def modules(self, model: Model, notes: Notes) -> None:
        """Puts 4-bit layers in the place of the linear ones.

        Raises UnsupportedError, with the model left as it was, when it is quantized already in another way, when
        GPTQModel is not there or cannot quantize it, and when the calibration text does not fit it.
        """
        from optigpu.surgery.gptqmodel.checkpoints import compute_in_four_bits

        text = Calibration(self.calibration, self.samples, self.length, self.seed)
        compute_in_four_bits(model, Recipe(self.name, self.group_size, text), notes)
