from typing import Literal, Self

from pydantic import Field, model_validator

from optigpu.techniques.base import ON_MODELS, Expected, Model, Notes, Phase, Technique, Trial
from optigpu.vocabulary import DeviceKind


class MagnitudePruning(Technique):
    """Zeroes the weights of least magnitude, in each linear layer by itself; embeddings and a tied head stay whole.

    Nothing is trained again, and zeros are stored like any other number. With structure 2:4 and 16-bit weights on CUDA
    the layers that are linear still when the whole stack is applied run on sparse tensor cores.
    """

    phase = Phase.PRUNING
    tasks = ON_MODELS
    summary = "the smallest weights of each linear layer become zero, without training again"
    citation = (
        "Han et al., Learning both Weights and Connections, 2015, arXiv:1506.02626; Mishra et al., Accelerating Sparse "
        "Deep Neural Networks, 2021, arXiv:2104.08378 (2:4)"
    )
    expected = (
        Expected("arithmetic", "no gain in speed or size where zeros are multiplied like other numbers"),
        Expected(
            "literature",
            "up to 2x for large products with 2:4 on sparse tensor cores",
            "Mishra et al., 2021, arXiv:2104.08378",
        ),
        Expected(
            "literature",
            "at 50% a clear loss of quality",
            "Frantar and Alistarh, SparseGPT, 2023, arXiv:2301.00774",
        ),
    )
    cautionary = True
    error_bound = 0.5
    trials = (
        Trial({"sparsity": 0.1}),
        Trial({"structure": "2:4"}, beside=("bf16",), devices=(DeviceKind.CUDA,), error_bound=1.0),
    )

    name: Literal["magnitude_pruning"] = "magnitude_pruning"
    sparsity: float = Field(0.5, gt=0, lt=1)
    structure: Literal["unstructured", "2:4"] = "unstructured"

    @model_validator(mode="after")
    def _two_of_four_is_half(self) -> Self:
        if self.structure == "2:4" and self.sparsity != 0.5:
            raise ValueError("structure 2:4 zeroes two of four weights: leave sparsity at 0.5")
        return self

    def modules(self, model: Model, notes: Notes) -> None:
        """Zeroes in place.

        Raises UnsupportedError, with the model left as it was, when there is no linear layer but a tied head, when the
        model is quantized, when a weight is NaN or infinite, and for 2:4 when a layer's inputs are not a multiple of
        four.
        """
        from optigpu.surgery.sparse_layers import prune_layers

        notes.record(**prune_layers(model, self.name, self.sparsity, self.structure), pruning=self.structure)

    def finish(self, model: Model, notes: Notes) -> None:
        """Gives 2:4 layers to the sparse tensor cores, where there are any."""
        from optigpu.surgery.sparse_layers import exchange_sparse

        if self.structure == "2:4" and model.device.type == "cuda":
            notes.record(sparse_layers=exchange_sparse(model))
