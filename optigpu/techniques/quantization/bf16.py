from typing import Literal

from optigpu.documents.result import Environment
from optigpu.techniques.base import Expected, LoadOptions, PrecisionTechnique
from optigpu.vocabulary import DeviceKind


class Bf16(PrecisionTechnique):
    """Loads the model in bfloat16."""

    summary = "weights and activations in bfloat16: half the bytes, the range of fp32"
    citation = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv:1905.12322"
    expected = (
        Expected("arithmetic", "half the bytes, so up to 2x where decoding is bound by memory"),
        Expected(
            "measured here",
            "GPT-2 124M: 1.43 times the baseline on two Zen 4 cores, 0.84 times on a Sapphire Rapids",
            "decisions/0011-four-bits.md",
        ),
        Expected("aim", "slower on CPUs without bf16"),
    )
    error_bound = 0.1

    name: Literal["bf16"] = "bf16"

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """On a CPU it slows down the stack that int8_weight_only carries, bf16 instructions or not: decision 11."""
        return device is DeviceKind.CUDA

    def load(self, options: LoadOptions) -> LoadOptions:
        return options.but(dtype="bfloat16")
