from functools import partial
from typing import Literal

from pydantic import Field

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, refusal
from optigpu.techniques.base import Choice, Expected, Model, Notes, Parts, TrainingTechnique, Trial
from optigpu.vocabulary import DeviceKind


class MixedPrecision(TrainingTechnique):
    """Forward passes under torch.autocast.

    float16 ends at 65,504 and loses what is below 6e-8: losses are scaled up, a step whose gradients are not finite is
    left out, and the norm of the gradient is clipped. bfloat16 has the range of float32 and needs none of that.
    """

    summary = "matrix products in bfloat16 or float16, weights and updates in float32"
    citation = "Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740"
    expected = (
        Expected("arithmetic", "half the bytes of stored activations; those of weights and optimizer stay"),
        Expected("literature", "2x to 3x on GPUs with tensor cores"),
        Expected("aim", "slower on CPUs without bf16"),
    )
    choices = (Choice.PRECISION,)
    error_bound = 0.01
    trials = (
        Trial(),
        # The first step may be left out, until the scale of the loss is small enough.
        Trial({"dtype": "float16"}, devices=(DeviceKind.CUDA,), error_bound=0.05),
    )

    name: Literal["mixed_precision"] = "mixed_precision"
    dtype: Literal["bfloat16", "float16"] = Field(
        "bfloat16", description="The type that matrix products compute in."
    )
    clip_norm: float = Field(
        1.0, gt=0, description="The most that the norm of the gradient may be; with float16 alone."
    )

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if self.dtype == "bfloat16":
            return None
        return refusal(device, Ability.SCALED_LOSS, "mixed_precision in float16", "set dtype to bfloat16")

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """Most CPUs have no bf16 units."""
        return device is DeviceKind.CUDA

    def chosen(self) -> tuple[Choice, ...]:
        """Loss scaling and clipping look at the whole gradient before a weight changes."""
        return (*self.choices, Choice.WHOLE_GRADIENT) if self.dtype == "float16" else self.choices

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        import torch

        notes.record(autocast=self.dtype)
        autocast = partial(torch.autocast, model.device.type, dtype=getattr(torch, self.dtype))
        parts = parts.but(around=(*parts.around, autocast))
        if self.dtype == "bfloat16":
            return parts
        notes.record(loss_scaling=True, clip_norm=self.clip_norm)
        return parts.but(loss_scaling=True, clip_norm=self.clip_norm)
