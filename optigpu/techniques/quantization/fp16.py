from typing import Literal

from optigpu.techniques.base import Expected, LoadOptions, PrecisionTechnique


class Fp16(PrecisionTechnique):
    """Loads the model in float16."""

    summary = "weights and activations in IEEE half precision"
    citation = "Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740"
    expected = (Expected("arithmetic", "half the bytes, so up to 2x where decoding is bound by memory"),)
    error_bound = 0.02
    only_when_asked = True  # CPUs compute float16 slowly; on GPUs bf16 has the same speed and more range

    name: Literal["fp16"] = "fp16"

    def load(self, options: LoadOptions) -> LoadOptions:
        return options.but(dtype="float16")
