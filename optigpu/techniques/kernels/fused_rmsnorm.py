from typing import Literal

from optigpu.surgery.norm_blocks import FusedNorms
from optigpu.techniques.base import Expected


class FusedRmsnorm(FusedNorms):
    """Rewrites the decoder's blocks so that each sum that is normed is made by the norm's own kernel.

    transformers computes an RMSNorm by seven operators, so far more goes than with a LayerNorm.
    """

    summary = "adding the residual and RMSNorm in one kernel"
    citation = "Hsu et al., Liger Kernel, 2024, arXiv:2410.10989"
    expected = (
        Expected("arithmetic", "seven operators fewer for each norm"),
        Expected(
            "aim",
            "a few percent where launches dominate (small models, batch 1); no change under torch_compile, "
            "which fuses these itself",
        ),
    )
    # A compiled step, the better rung, fuses norms by itself, so that it is tried only when asked for.
    kind = "RMSNorm"

    name: Literal["fused_rmsnorm"] = "fused_rmsnorm"
