from typing import Any, Literal

from optigpu.techniques.base import Expected, Model, Notes, Parts, Phase, TrainingTechnique


class SequencePacking(TrainingTechnique):
    """Arranges the documents of a step in as few rows as first-fit decreasing finds, instead of a row for each.

    Attention is masked to a token's own document, and positions begin at 0 in each, so that every document's losses are
    those that it has in a row of its own. It is for documents of different lengths.
    """

    phase = Phase.EXECUTION
    summary = "several documents share a row, each with attention and positions of its own"
    citation = "Krell et al., Efficient Sequence Packing without Cross-contamination, 2021, arXiv:2107.02027"
    expected = (
        Expected(
            "arithmetic",
            "fewer rows by the share of padding, so up to twice the tokens in the same time where lengths are drawn "
            "evenly from short to a whole row",
        ),
        Expected("literature", "2x for pre-training BERT on Wikipedia with rows of 512 tokens"),
        Expected("aim", "less where the mask keeps attention from its fastest kernel"),
    )
    only_when_asked = True  # It needs documents of different lengths

    name: Literal["sequence_packing"] = "sequence_packing"

    def fits(self, workload: Any) -> str | None:
        """Documents that all fill a row leave nothing to pack."""
        if workload.shortest_tokens is not None and workload.shortest_tokens < workload.sequence_tokens:
            return None
        return (
            "sequence_packing needs documents that are shorter than a row; set shortest_tokens below "
            f"{workload.sequence_tokens}."
        )

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        """Replaces the arrangement of documents.

        Raises UnsupportedError for a model that takes no texts, or whose documents would see one another.
        """
        from optigpu.surgery.training_steps import PackedArrangement

        return parts.but(arrange=PackedArrangement(model, notes))
