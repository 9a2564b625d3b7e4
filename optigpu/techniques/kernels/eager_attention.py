from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.techniques.base import EVERYWHERE, Expected, KernelTechnique, LoadOptions, Model, Notes


class EagerAttention(KernelTechnique):
    """A cautionary rung: the scores are stored, and the softmax is a kernel of its own."""

    tasks = EVERYWHERE
    summary = "attention as separate operators; what fused_attention is compared with"
    citation = "Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762"
    expected = (Expected("aim", "slower than the library's default, which is already fused"),)
    conflicts: ClassVar[Mapping[str, str]] = {"fused_attention": "attention is fused or it is not"}
    cautionary = True

    name: Literal["eager_attention"] = "eager_attention"

    def load(self, options: LoadOptions) -> LoadOptions:
        return options.but(attention="eager")

    def modules(self, model: Model, notes: Notes) -> None:
        """Changes nothing. Raises UnsupportedError where transformers' eager attention computes something else."""
        from optigpu.surgery.sameness import require_same_attention

        require_same_attention(self.name, model)
