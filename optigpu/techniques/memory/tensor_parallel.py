"""tensor_parallel: heads and inner features of every block divided among processes."""

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


class TensorParallel(Technique):
    """Divides the matrices of every block among processes of this machine, which add up their products twice a block.

    The embedding and the head are whole in the measuring process. Threads are divided as well, so that on one machine
    it shows what dividing costs; memory of the measuring process alone is in the result.
    """

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.PLACEMENT
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    summary: ClassVar[str] = "heads and inner features of every block divided among processes"
    citation: ClassVar[str] = "Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "each of two processes reads half of the blocks' weights, and adds up the products of both twice a block",
        ),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.PROCESSES,)
    conflicts: ClassVar[Mapping[str, str]] = WHOLE_IN_ONE_PROCESS
    process_wide: ClassVar[bool] = True

    name: Literal["tensor_parallel"] = "tensor_parallel"
    ways: int = Field(2, ge=2, le=16, description="Among how many processes the model is divided.")

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """A model that fits one process loses by it on one machine."""
        return False

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Leaves this process its part, and starts the other processes with theirs."""
        from optigpu.surgery.parallel.tensor import divide

        divide(model, self.ways)
        notes.record(tensor_parallel={"ways": self.ways, "through": "torch.distributed with gloo"})
