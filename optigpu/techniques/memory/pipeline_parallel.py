from typing import Literal

from optigpu.surgery.parallel.technique import ModelParallel
from optigpu.techniques.base import Expected, Model, Notes


class PipelineParallel(ModelParallel):
    """Divides the blocks among processes of this machine; each passes the hidden states on to the next.

    One process computes at a time: without micro-batches it makes room, not speed. The embedding, the last norm and the
    head are in the measuring process, whose memory alone is in the result.
    """

    summary = "blocks divided among processes, which pass the hidden states on"
    citation = "Huang et al., GPipe, 2018, arXiv:1811.06965"
    expected = (
        Expected(
            "arithmetic", "each of two processes holds half of the blocks, and waits while the other computes"
        ),
    )

    name: Literal["pipeline_parallel"] = "pipeline_parallel"

    def modules(self, model: Model, notes: Notes) -> None:
        """Leaves this process its part, and starts the other processes with theirs."""
        from optigpu.surgery.parallel.pipeline import divide

        divide(model, self.ways)
        notes.record(pipeline_parallel={"ways": self.ways, "through": "torch.distributed with gloo"})
