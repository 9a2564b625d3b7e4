from typing import Literal

from optigpu.surgery.norm_blocks import FusedNorms
from optigpu.techniques.base import Expected


class FusedLayernorm(FusedNorms):
    """Rewrites the decoder's blocks so that each sum that is normed is made by the norm's own kernel.

    A LayerNorm is one operator of torch already: what goes is the addition before it, and a read of its result.
    """

    summary = "adding the residual and LayerNorm in one kernel"
    citation = "Aminabadi et al., DeepSpeed Inference, 2022, arXiv:2207.00032 (Deep-Fusion)"
    expected = (
        Expected("arithmetic", "one launch fewer for each norm on a GPU"),
        Expected(
            "measured here",
            "no gain with fused GELU in a compiled step of GPT-2 on two Zen 4 cores: 9.23x with both, 9.96x "
            "without",
            "results/README.md",
        ),
        Expected(
            "aim",
            "little; on a CPU no measurable change beside the matrix products, and none under torch_compile, "
            "which fuses these itself",
        ),
    )
    # The gain is too small to be tried unasked, so that it is tried only when asked for.
    kind = "LayerNorm"

    name: Literal["fused_layernorm"] = "fused_layernorm"
