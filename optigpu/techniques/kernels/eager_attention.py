"""eager_attention: attention as separate operators, the reference for fused_attention."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.techniques.base import (
    IN_TRAINING,
    ON_MODELS,
    Basis,
    Expected,
    LoadOptions,
    Notes,
    Phase,
    Technique,
)
from optigpu.vocabulary import Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EagerAttention(Technique):
    """A cautionary rung: the scores are stored, and the softmax is a kernel of its own."""

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    tasks: ClassVar[tuple[Task, ...]] = (*ON_MODELS, *IN_TRAINING)
    summary: ClassVar[str] = "attention as separate operators; what fused_attention is compared with"
    citation: ClassVar[str] = "Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.AIM,
            "slower than the library's default, which is already fused",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {"fused_attention": "attention is fused or it is not"}
    cautionary: ClassVar[bool] = True

    name: Literal["eager_attention"] = "eager_attention"

    def load(self, options: LoadOptions) -> LoadOptions:
        """The library's eager attention."""
        return options.but(attention="eager")

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Changes nothing. Raises UnsupportedError where transformers' eager attention computes something else."""
        from optigpu.surgery.sameness import require_same_attention

        require_same_attention(self.name, model)
