from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, refusal
from optigpu.techniques.base import Expected, Model, Notes, Parts, TrainingTechnique, Trial
from optigpu.vocabulary import DeviceKind


class ActivationOffload(TrainingTechnique):
    """Moves each saved tensor away as it is saved, and back when the backward pass asks for it; values stay the same.

    `target` "host" is pinned memory beside a GPU, "disk" a file of each step in the folder for temporary files. Tensors
    of fewer than `smallest_bytes` and weights stay where they are. A tensor that several operations save is moved once.
    """

    summary = "saved activations wait in the host's memory or on a disk"
    citation = "Rhu et al., vDNN, 2016, arXiv:1602.08124"
    expected = (
        Expected(
            "arithmetic",
            "the device keeps a few layers' activations instead of all, and each byte of the others crosses the bus "
            "twice in a step",
        ),
        Expected("aim", "slower: gradient_checkpointing often costs less time for the same memory"),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "compile_training": "a compiled forward pass hands over all that it saves at its end, when it is too late"
    }
    trials = (
        Trial({"target": "disk", "smallest_bytes": 256}),
        Trial({"target": "host", "smallest_bytes": 256}, devices=(DeviceKind.CUDA,)),
    )
    only_when_asked = True  # What fits loses time by it

    name: Literal["activation_offload"] = "activation_offload"
    target: Literal["host", "disk"] = Field("host", description="Where saved tensors wait.")
    smallest_bytes: int = Field(65536, ge=1, description="The size from which a tensor is moved.")

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Only activations in another memory can wait in the host's."""
        if self.target == "disk":
            return None
        return refusal(device, Ability.OWN_MEMORY, "activation_offload to the host", "set target to disk")

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        from optigpu.surgery import host_memory

        store = host_memory.DiskStore if self.target == "disk" else host_memory.HostStore
        notes.record(activations_on=self.target)
        return parts.but(
            around=(*parts.around, host_memory.OffloadedSaving(model, store, self.smallest_bytes, notes))
        )
