"""pipeline_parallel: blocks divided among processes, which pass the hidden states on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import (
    ON_TEXT,
    WHOLE_IN_ONE_PROCESS,
    Basis,
    Choice,
    Expected,
    Notes,
    Phase,
    Technique,
)
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PipelineParallel(Technique):
    """Divides the blocks among processes of this machine; each passes the hidden states on to the next.

    One process computes at a time: without micro-batches it makes room, not speed. The embedding, the last norm and the
    head are in the measuring process, whose memory alone is in the result.
    """

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.PLACEMENT
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    summary: ClassVar[str] = "blocks divided among processes, which pass the hidden states on"
    citation: ClassVar[str] = "Huang et al., GPipe, 2018, arXiv:1811.06965"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "each of two processes holds half of the blocks, and waits while the other computes",
        ),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.PROCESSES,)
    conflicts: ClassVar[Mapping[str, str]] = WHOLE_IN_ONE_PROCESS
    process_wide: ClassVar[bool] = True

    name: Literal["pipeline_parallel"] = "pipeline_parallel"
    ways: int = Field(2, ge=2, le=16, description="Among how many processes the model is divided.")

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """A model that fits one process loses by it on one machine."""
        return False

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Leaves this process its part, and starts the other processes with theirs."""
        from optigpu.surgery.parallel.pipeline import divide

        divide(model, self.ways)
        notes.record(pipeline_parallel={"ways": self.ways, "through": "torch.distributed with gloo"})
