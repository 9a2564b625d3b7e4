from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.surgery.extras import FOUR_BITS
from optigpu.surgery.gptqmodel.technique import CalibratedFourBits, conv1d_reason
from optigpu.vocabulary import DeviceKind


class Awq(CalibratedFourBits):
    """Computes with the 4-bit layers of an AWQ checkpoint; any other model is quantized first, which takes minutes.

    The parameters are for quantizing, which GPTQModel does: `samples` sequences of `length` tokens that the model draws
    itself with `seed` ("self"), or out of a file in the folder of datasets ("file:NAME"). The head stays as it is.
    A ready checkpoint is compared with its own numbers in fp32, since the model that it was made of is not there.
    """

    summary = "4-bit weights, rounded more finely where calibration text has large activations"
    citation = "Lin et al., AWQ, 2023, arXiv:2306.00978"
    conflicts = FOUR_BITS
    has_offsets = True

    name: Literal["awq"] = "awq"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The library cannot scale every family; and what it needs must be installed."""
        refused = conv1d_reason(model.family) if model else None
        return refused or super().check(environment, device, model)
