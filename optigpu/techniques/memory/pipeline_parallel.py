"""pipeline_parallel: blocks divided among processes, which pass the hidden states on."""

from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.surgery.parallel.technique import ModelParallel
from optigpu.techniques.base import Basis, Expected, Notes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PipelineParallel(ModelParallel):
    """Divides the blocks among processes of this machine; each passes the hidden states on to the next.

    One process computes at a time: without micro-batches it makes room, not speed. The embedding, the last norm and the
    head are in the measuring process, whose memory alone is in the result.
    """

    summary: ClassVar[str] = "blocks divided among processes, which pass the hidden states on"
    citation: ClassVar[str] = "Huang et al., GPipe, 2018, arXiv:1811.06965"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "each of two processes holds half of the blocks, and waits while the other computes",
        ),
    )

    name: Literal["pipeline_parallel"] = "pipeline_parallel"

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Leaves this process its part, and starts the other processes with theirs."""
        from optigpu.surgery.parallel.pipeline import divide

        divide(model, self.ways)
        notes.record(pipeline_parallel={"ways": self.ways, "through": "torch.distributed with gloo"})
