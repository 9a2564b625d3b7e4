"""sequence_packing: several documents share a row, and none sees another."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.techniques.base import IN_TRAINING, Basis, Expected, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from optigpu.backends.training import TrainingParts


class SequencePacking(Technique):
    """Arranges the documents of a step in as few rows as first-fit decreasing finds, instead of a row for each.

    Attention is masked to a token's own document, and positions begin at 0 in each, so that every document's losses are
    those that it has in a row of its own. It is for documents of different lengths.
    """

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.EXECUTION
    tasks: ClassVar[tuple[Task, ...]] = IN_TRAINING
    summary: ClassVar[str] = "several documents share a row, each with attention and positions of its own"
    citation: ClassVar[str] = (
        "Krell et al., Efficient Sequence Packing without Cross-contamination, 2021, arXiv:2107.02027"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "fewer rows by the share of padding, so up to twice the tokens in the same time where lengths are drawn "
            "evenly from short to a whole row",
        ),
        Expected(Basis.LITERATURE, "2x for pre-training BERT on Wikipedia with rows of 512 tokens"),
        Expected(Basis.AIM, "less where the mask keeps attention from its fastest kernel"),
    )

    name: Literal["sequence_packing"] = "sequence_packing"

    def fits(self, workload: Any) -> str | None:
        """Documents that all fill a row leave nothing to pack."""
        if workload.shortest_tokens is not None and workload.shortest_tokens < workload.sequence_tokens:
            return None
        return (
            "sequence_packing needs documents that are shorter than a row; set shortest_tokens below "
            f"{workload.sequence_tokens}."
        )

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """It needs documents of different lengths."""
        return False

    def training(self, parts: "TrainingParts", model: "PreTrainedModel", notes: Notes) -> "TrainingParts":
        """Replaces the arrangement of documents.

        Raises UnsupportedError for a model that takes no texts, or whose documents would see one another.
        """
        from optigpu.techniques.training.sequence_packing.packing import PackedArrangement

        return parts.but(arrange=PackedArrangement(model, notes))
