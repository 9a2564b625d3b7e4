"""cpu_offload: weights of decoder layers in the host's memory, copied to the GPU while the layer before computes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.models.tensors import Part
from optigpu.techniques.base import ON_TEXT, Basis, Expected, LoadOptions, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from optigpu.models.tensors import StoredWeights

SLOTS = 2
"""Layers on the device at once: one that computes and one that arrives."""


class CpuOffload(Technique):
    """Loads the model on the host and brings one decoder layer after the other to the GPU, into two staging slots.

    So a model may be larger than the GPU's memory. The embedding, the head and the cache are on the GPU throughout.
    """

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.PLACEMENT
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    summary: ClassVar[str] = (
        "weights of decoder layers stay on the host and visit the GPU one layer at a time"
    )
    citation: ClassVar[str] = "Sheng et al., FlexGen, 2023, arXiv:2303.06865"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "every step waits for all weights to cross the bus",
        ),
        Expected(
            Basis.AIM,
            "runs models that do not fit the GPU, 10x slower and more at small batches",
        ),
    )
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.LANE,)
    conflicts: ClassVar[Mapping[str, str]] = {
        "torch_compile": "a compiled step needs weights that stay in place",
        "grad_enabled": "gradients need weights that stay in place",
        "autocast": "it keeps a converted copy of every weight on the GPU",
        **dict.fromkeys(
            ("int8_weight_only", "int8_dynamic"),
            "weights are packed for the device that loads them, and an offloaded model is loaded on the CPU",
        ),
    }

    name: Literal["cpu_offload"] = "cpu_offload"

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """A model that fits loses by it."""
        return False

    def load(self, options: LoadOptions) -> LoadOptions:
        """Loads the weights on the host, so that they need not fit the GPU."""
        return options.but(placement="host")

    def stored(self, weights: "StoredWeights", device: DeviceKind) -> "StoredWeights":
        """The device holds the slots' layers alone."""
        staged = (
            replace(each, count=min(each.count, SLOTS)) if each.part is Part.LINEAR else each
            for each in weights.matrices
        )
        return weights.but(matrices=tuple(staged))

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Lays each layer's weights into a buffer of pinned memory and hooks its copies around the layer.

        Raises UnsupportedError when the model has no decoder layers, or weights that are not plain tensors.
        """
        from optigpu.techniques.memory.cpu_offload.streaming import destination, offload

        notes.record(**offload(model, *destination()))
