from typing import Literal

from optigpu.surgery.extras import FOUR_BITS
from optigpu.surgery.gptqmodel.technique import CalibratedFourBits


class Gptq(CalibratedFourBits):
    """Computes with the 4-bit layers of a GPTQ checkpoint; any other model is quantized first, which takes minutes.

    The parameters are for quantizing, which GPTQModel does: `samples` sequences of `length` tokens that the model draws
    itself with `seed` ("self"), or out of a file in the folder of datasets ("file:NAME"). The head stays as it is.
    A ready checkpoint is compared with its own numbers in fp32, since the model that it was made of is not there.
    """

    summary = "4-bit weights whose rounding errors cancel out on calibration text"
    citation = "Frantar et al., GPTQ, 2022, arXiv:2210.17323"
    conflicts = FOUR_BITS | {
        "magnitude_pruning": "the corrections for rounding errors would fill the zeros again"
    }
    has_offsets = False

    name: Literal["gptq"] = "gptq"
