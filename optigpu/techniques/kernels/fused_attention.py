"""fused_attention: scaled dot-product attention in one kernel."""

from typing import ClassVar, Literal

from optigpu.techniques.base import LoadOptions, Phase, Technique
from optigpu.vocabulary import Layer


class FusedAttention(Technique):
    """Attention through torch's scaled_dot_product_attention; which kernel ran is recorded."""

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    summary: ClassVar[str] = "softmax(QK^T)V in one kernel that never stores the scores"
    citation: ClassVar[str] = "Dao et al., FlashAttention, 2022, arXiv:2205.14135"
    expected: ClassVar[str] = "nothing at short lengths; memory linear instead of quadratic in the length"
    compared_with: ClassVar[tuple[str, ...]] = ("eager_attention",)

    name: Literal["fused_attention"] = "fused_attention"

    def load(self, options: LoadOptions) -> LoadOptions:
        """The library's sdpa attention, asked for by name."""
        return options.but(attention="sdpa")
