from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from optigpu.techniques.base import Expected, Model, Notes, Parts, TrainingTechnique

if TYPE_CHECKING:
    from optigpu.backends.training import MicroBatch, TrainingBatch


class GradientAccumulation(TrainingTechnique):
    """The same samples, loss and update, with the activations of one micro-batch at a time.

    Losses are divided by the targets of the whole step, so that documents of different lengths weigh as much as in one
    batch. A batch norm sees one micro-batch at a time: a model with some computes something else.
    """

    summary = "a step in micro-batches whose gradients are added up: a large batch in little memory"
    citation = "Ott et al., Scaling Neural Machine Translation, 2018, arXiv:1806.00187"
    expected = (
        Expected("arithmetic", "the activations of a micro-batch instead of a batch"),
        Expected("aim", "slower where a micro-batch is too small to fill the device"),
    )
    only_when_asked = True  # It saves memory, not time

    name: Literal["gradient_accumulation"] = "gradient_accumulation"
    micro_batches: int = Field(
        2, ge=2, le=4096, description="Into how many parts a step's samples are split."
    )

    def fits(self, workload: Any) -> str | None:
        """All micro-batches have as many samples."""
        if workload.batch_size % self.micro_batches == 0:
            return None
        return (
            f"gradient_accumulation splits a batch of {workload.batch_size} into {self.micro_batches} equal parts, "
            "which is not possible; make batch_size a multiple of micro_batches."
        )

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        whole = parts.arrange

        def arrange(batch: "TrainingBatch") -> "list[MicroBatch]":
            return [rows for part in batch.split(self.micro_batches) for rows in whole(part)]

        notes.record(micro_batches=self.micro_batches)
        return parts.but(arrange=arrange)
