"""magnitude_pruning: the smallest weights of each linear layer become zero."""

import functools
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optigpu.surgery.places import Place, checked_places, exchange, linear_places, weight_of
from optigpu.techniques.base import ON_MODELS, Notes, Phase, Technique
from optigpu.vocabulary import Layer, Task, UnsupportedError

GROUP = 4
"""Of so many inputs in a row 2:4 keeps two."""
SPARSE_ROWS, SPARSE_INNER = 32, 64
"""What outputs and inputs must be multiples of for torch's 2:4 kernels in 16 bits (SparseSemiStructuredTensor)."""
AMPERE = (8, 0)
"""The first compute capability with sparse tensor cores."""


class MagnitudePruning(Technique):
    """Zeroes the weights of least magnitude, in each linear layer by itself; embeddings and a tied head stay whole.

    Nothing is trained again, and zeros are stored like any other number. With structure 2:4 and 16-bit weights on CUDA
    the layers that are linear still when the whole stack is applied run on sparse tensor cores.
    """

    layer: ClassVar[Layer] = Layer.SPARSITY
    phase: ClassVar[Phase] = Phase.PRUNING
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = "the smallest weights of each linear layer become zero, without training again"
    citation: ClassVar[str] = (
        "Han et al., Learning both Weights and Connections, 2015, arXiv:1506.02626; Mishra et al., Accelerating Sparse "
        "Deep Neural Networks, 2021, arXiv:2104.08378 (2:4)"
    )
    expected: ClassVar[str] = (
        "no speed and no bytes where zeros are multiplied like other numbers; up to 2x for large products with 2:4 on "
        "sparse tensor cores; at 50% a clear loss of quality (Frantar & Alistarh, SparseGPT, 2023, arXiv:2301.00774)"
    )
    cautionary: ClassVar[bool] = True

    name: Literal["magnitude_pruning"] = "magnitude_pruning"
    sparsity: float = Field(0.5, gt=0, lt=1)
    structure: Literal["unstructured", "2:4"] = "unstructured"

    @model_validator(mode="after")
    def _two_of_four_is_half(self) -> Self:
        if self.structure == "2:4" and self.sparsity != 0.5:
            raise ValueError("structure 2:4 zeroes two of four weights: leave sparsity at 0.5")
        return self

    def modules(self, model: Any, notes: Notes) -> None:
        """Zeroes in place.

        Raises UnsupportedError, with the model left as it was, when there is no linear layer but a tied head, when the
        model is quantized, when a weight is no number, and for 2:4 when a layer's inputs are no multiple of four.
        """
        group = GROUP if self.structure == "2:4" else 1
        places = _untied(model, checked_places(model, self.name, group))
        if not places:
            raise UnsupportedError(
                f"{self.name}: the only linear layer is the head, which shares its weights with the embedding; leave "
                "it out of the stack."
            )
        for place in places:
            prune(weight_of(place.layer), self.sparsity, self.structure)
        weights = [weight_of(place.layer) for place in places]
        zeros = sum(int((weight == 0).sum()) for weight in weights)
        share = zeros / sum(weight.numel() for weight in weights)
        notes.record(pruned_layers=len(places), zeros_share=share, pruning=self.structure)

    def finish(self, model: Any, notes: Notes) -> None:
        """Gives 2:4 layers to the sparse tensor cores, where there are any."""
        if self.structure != "2:4" or model.device.type != "cuda":
            return
        places = [place for place in _untied(model, linear_places(model)) if _has_sparse_kernel(place.layer)]
        exchange(places, lambda layer: _sparse_linear_class()(weight_of(layer).contiguous(), layer.bias))
        notes.record(sparse_layers=len(places))


def prune(weight: Any, sparsity: float, structure: str) -> None:
    """Zeroes the smallest of `weight`, [outputs, inner], in place: exactly as many as asked for, the first of equals.

    Unstructured that is the share `sparsity` of all, 2:4 two of every four inputs in a row. `weight` may be a view.
    """
    import torch

    with torch.no_grad():
        size = weight.abs()
        if structure == "2:4":
            weight.masked_fill_(_two_of_four(size), 0)
        else:
            weight.masked_fill_(_smallest(size, round(sparsity * size.numel())), 0)


def _two_of_four(size: Any) -> Any:
    """A mask of the two smallest of every four along the last dimension."""
    import torch

    fours = size.reshape(size.shape[0], -1, GROUP)
    order = fours.argsort(dim=-1, stable=True)
    smallest = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, order[..., : GROUP // 2], True)
    return smallest.reshape(size.shape)


def _smallest(size: Any, count: int) -> Any:
    """A mask of the `count` smallest numbers; 16-bit weights have many equal ones, of which the first are taken."""
    import torch

    if count == 0:
        return torch.zeros_like(size, dtype=torch.bool)
    flat = size.flatten()
    limit = flat.kthvalue(count).values
    mask = flat < limit
    equal = (flat == limit).nonzero()[:, 0]
    mask[equal[: count - int(mask.sum())]] = True
    return mask.reshape(size.shape)


def _untied(model: Any, places: list[Place]) -> list[Place]:
    """Without a head that shares its weights with an embedding."""
    from torch.nn import Embedding

    tables = {_address(module) for module in model.modules() if isinstance(module, Embedding)}
    return [place for place in places if _address(place.layer) not in tables]


def _address(layer: Any) -> int:
    return int(layer.weight.untyped_storage().data_ptr())


def _has_sparse_kernel(layer: Any) -> bool:
    """Whether torch has a 2:4 kernel for such a layer: 16 bits, sizes that fill its tiles, and a GPU since Ampere."""
    import torch

    outputs, inner = weight_of(layer).shape
    fits = outputs % SPARSE_ROWS == 0 and inner % SPARSE_INNER == 0
    is_half = layer.weight.dtype in (torch.float16, torch.bfloat16)
    return fits and is_half and torch.cuda.get_device_capability(layer.weight.device) >= AMPERE


@functools.cache
def _sparse_linear_class() -> Any:
    """Made at its first use, because its base class is torch's."""
    import torch

    class SparseLinear(torch.nn.Module):
        """y = x @ W.T + bias with a 2:4 W that is stored as half of its weights and two bits of position each."""

        bias: torch.Tensor | None

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            super().__init__()
            self._weight = torch.sparse.to_sparse_semi_structured(weight.detach())
            # What it consists of, for those who walk over the model: it has no storage of its own.
            for name in self._weight.__tensor_flatten__()[0]:
                self.register_buffer(name, getattr(self._weight, name))
            self.register_buffer("bias", bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self._weight, self.bias)

    return SparseLinear
