from typing import Literal

from optigpu.surgery.parallel.technique import ModelParallel
from optigpu.techniques.base import Expected, Model, Notes


class TensorParallel(ModelParallel):
    """Divides the matrices of every block among processes of this machine, which add up their products twice a block.

    The embedding and the head are whole in the measuring process. Threads are divided as well, so that on one machine
    it shows what dividing costs; memory of the measuring process alone is in the result.
    """

    summary = "heads and inner features of every block divided among processes"
    citation = "Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053"
    expected = (
        Expected(
            "arithmetic",
            "each of two processes reads half of the blocks' weights, and adds up the products of both twice a block",
        ),
    )

    name: Literal["tensor_parallel"] = "tensor_parallel"

    def modules(self, model: Model, notes: Notes) -> None:
        """Leaves this process its part, and starts the other processes with theirs."""
        from optigpu.surgery.parallel.tensor import divide

        divide(model, self.ways)
        notes.record(tensor_parallel={"ways": self.ways, "through": "torch.distributed with gloo"})
