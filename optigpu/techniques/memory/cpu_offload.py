from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.models.described import Part, StoredWeights
from optigpu.surgery.extras import STAGING_SLOTS
from optigpu.techniques.base import ON_TEXT, Expected, LoadOptions, Model, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind


class CpuOffload(Technique):
    """Loads the model on the host and brings one decoder layer after the other to the GPU, into two staging slots.

    So a model may be larger than the GPU's memory. The embedding, the head and the cache are on the GPU throughout.
    """

    phase = Phase.PLACEMENT
    tasks = ON_TEXT
    summary = "weights of decoder layers stay on the host and visit the GPU one layer at a time"
    citation = "Sheng et al., FlexGen, 2023, arXiv:2303.06865"
    expected = (
        Expected("arithmetic", "every step waits for all weights to cross the bus"),
        Expected("aim", "runs models that do not fit the GPU, 10x slower and more at small batches"),
    )
    abilities = (Ability.LANE,)
    conflicts: ClassVar[Mapping[str, str]] = {
        "torch_compile": "a compiled step needs weights that stay in place",
        "grad_enabled": "gradients need weights that stay in place",
        "autocast": "it keeps a converted copy of every weight on the GPU",
        **dict.fromkeys(
            ("int8_weight_only", "int8_dynamic"),
            "weights are packed for the device that loads them, and an offloaded model is loaded on the CPU",
        ),
    }
    only_when_asked = True  # A model that fits loses by it

    name: Literal["cpu_offload"] = "cpu_offload"

    def load(self, options: LoadOptions) -> LoadOptions:
        return options.but(placement="host")

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """The device holds the slots' layers alone."""
        staged = (
            replace(each, count=min(each.count, STAGING_SLOTS)) if each.part is Part.LINEAR else each
            for each in weights.matrices
        )
        return weights.but(matrices=tuple(staged))

    def modules(self, model: Model, notes: Notes) -> None:
        """Lays each layer's weights into a buffer of pinned memory and hooks its copies around the layer.

        Raises UnsupportedError when the model has no decoder layers, or weights that are not plain tensors.
        """
        from optigpu.surgery.host_memory import destination, offload

        notes.record(**offload(model, *destination()))
