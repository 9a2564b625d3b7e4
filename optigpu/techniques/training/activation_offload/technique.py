"""activation_offload: what the forward pass keeps for the backward pass waits in the host's memory or on a disk."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability, refusal
from optigpu.techniques.base import IN_TRAINING, Basis, Expected, Notes, Phase, Technique, Trial
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from optigpu.backends.training import TrainingParts


class ActivationOffload(Technique):
    """Moves each saved tensor away as it is saved, and back when the backward pass asks for it; values stay the same.

    `target` "host" is pinned memory beside a GPU, "disk" a file of each step in the folder for temporary files. Tensors
    of fewer than `smallest_bytes` and weights stay where they are. A tensor that several operations save is moved once.
    """

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.TRAINING
    tasks: ClassVar[tuple[Task, ...]] = IN_TRAINING
    summary: ClassVar[str] = "saved activations wait in the host's memory or on a disk"
    citation: ClassVar[str] = "Rhu et al., vDNN, 2016, arXiv:1602.08124"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "the device keeps a few layers' activations instead of all, and each byte of the others crosses the bus "
            "twice in a step",
        ),
        Expected(Basis.AIM, "slower: gradient_checkpointing often costs less time for the same memory"),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "compile_training": "a compiled forward pass hands over all that it saves at its end, when it is too late",
    }
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial({"target": "disk", "smallest_bytes": 256}),
        Trial({"target": "host", "smallest_bytes": 256}, devices=(DeviceKind.CUDA,)),
    )

    name: Literal["activation_offload"] = "activation_offload"
    target: Literal["host", "disk"] = Field("host", description="Where saved tensors wait.")
    smallest_bytes: int = Field(65536, ge=1, description="The size from which a tensor is moved.")

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Only activations in another memory can wait in the host's."""
        if self.target == "disk":
            return None
        return refusal(device, Ability.OWN_MEMORY, "activation_offload to the host", "set target to disk")

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """What fits loses time by it."""
        return False

    def training(self, parts: "TrainingParts", model: "PreTrainedModel", notes: Notes) -> "TrainingParts":
        """Catches what forward passes save."""
        from optigpu.techniques.training.activation_offload.saving import (
            DiskStore,
            HostStore,
            OffloadedSaving,
        )

        store = DiskStore if self.target == "disk" else HostStore
        notes.record(activations_on=self.target)
        return parts.but(around=(*parts.around, OffloadedSaving(model, store, self.smallest_bytes, notes)))
