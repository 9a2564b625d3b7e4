from functools import partial
from typing import Literal

from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability
from optigpu.models.tensors import StoredWeights
from optigpu.ops.layouts import int4_bytes
from optigpu.surgery.extras import FOUR_BITS, Package
from optigpu.surgery.gptqmodel.recipe import RecipeParameters
from optigpu.techniques.base import ON_TEXT, Choice, Expected, LoadOptions, Model, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer


class Gptq(RecipeParameters, Technique):
    """Computes with the 4-bit layers of a GPTQ checkpoint; any other model is quantized first, which takes minutes.

    The parameters are for quantizing, which GPTQModel does: `samples` sequences of `length` tokens that the model draws
    itself with `seed` ("self"), or out of a file in the folder of datasets ("file:NAME"). The head stays as it is.
    A ready checkpoint is compared with its own numbers in fp32, since the model that it was made of is not there.
    """

    layer = Layer.QUANTIZATION
    phase = Phase.QUANTIZATION
    tasks = ON_TEXT
    abilities = (Ability.OWN_KERNELS,)
    summary = "4-bit weights whose rounding errors cancel out on calibration text"
    citation = "Frantar et al., GPTQ, 2022, arXiv:2210.17323"
    expected = (
        Expected("arithmetic", "a sixth to a seventh of the fp32 bytes of the layers that it replaces"),
        Expected("literature", "less loss than rounding to nearest"),
        Expected("aim", "the speed of int4_weight_only"),
    )
    conflicts = FOUR_BITS | {
        "magnitude_pruning": "the corrections for rounding errors would fill the zeros again"
    }
    choices = (Choice.WEIGHTS,)
    error_bound = 0.5
    only_when_asked = True  # Quantizing takes minutes, and its loss depends on the text

    name: Literal["gptq"] = "gptq"

    def packages(self, model: ModelFacts | None) -> tuple[Package, ...]:
        """Quantizing needs the extra; a model that is known before it is loaded is not a ready checkpoint."""
        return ("gptqmodel",) if model else ()

    def load(self, options: LoadOptions) -> LoadOptions:
        return options.but(packed="gptq")

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        layout = partial(int4_bytes, device=device, group=self.group_size, offsets=False, half=weights.half)
        return weights.with_bytes(layout, head=False)

    def modules(self, model: Model, notes: Notes) -> None:
        """Puts 4-bit layers in the place of the linear ones.

        Raises UnsupportedError, with the model left as it was, when it is quantized already in another way, when
        GPTQModel is not there or cannot quantize it, and when the calibration text does not fit it.
        """
        from optigpu.surgery.gptqmodel.checkpoints import compute_in_four_bits

        compute_in_four_bits(model, self.recipe("gptq"), notes)
