"""Zeroing weights by their magnitude, and layers for torch's 2:4 sparse kernels."""

from typing import Literal

import torch
from transformers import PreTrainedModel

from optigpu.models.loading.storages import storage_of
from optigpu.surgery.places import LinearLayer, Place, checked_places, exchange, linear_places, weight_of
from optigpu.vocabulary import UnsupportedError

Structure = Literal["unstructured", "2:4"]
GROUP = 4
"""2:4 keeps two of this many neighbouring inputs."""
SPARSE_ROWS, SPARSE_INNER = 32, 64
"""What outputs and inputs must be multiples of for torch's 2:4 kernels in 16 bits (SparseSemiStructuredTensor)."""
AMPERE = (8, 0)
"""The first compute capability with sparse tensor cores."""


class SparseLinear(torch.nn.Module):
    """y = x @ W.T + bias with a 2:4 W that is stored as half of its weights and two bits of position each."""

    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight = torch.sparse.to_sparse_semi_structured(weight.detach())
        # Its parts, for code that walks over the model's tensors: the tensor itself has no storage.
        for name in self._weight.__tensor_flatten__()[0]:
            self.register_buffer(name, getattr(self._weight, name))
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch's 2:4 products take matrices only; an input of more dimensions would need a batched product.
        rows = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self._weight, self.bias)
        return rows.reshape(*x.shape[:-1], -1)


def prune_layers(
    model: PreTrainedModel, technique: str, sparsity: float, structure: Structure
) -> dict[str, int | float]:
    """Zeroes the smallest weights of every linear layer but a tied head; returns what is recorded of it.

    Raises UnsupportedError, with the model left as it was, when there is none, and as `checked_places` does.
    """
    places = _untied(model, checked_places(model, technique, GROUP if structure == "2:4" else 1))
    if not places:
        raise UnsupportedError(
            f"{technique} leaves a head that shares its weights with the embedding as it is, and this model has no "
            "other linear layer; leave it out of the stack."
        )
    for place in places:
        prune(weight_of(place.layer), sparsity, structure)
    weights = [weight_of(place.layer) for place in places]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    share = zeros / sum(weight.numel() for weight in weights)
    return {"pruned_layers": len(places), "zeros_share": share}


def exchange_sparse(model: PreTrainedModel) -> int:
    """Gives pruned layers to the sparse tensor cores, where there are any; returns how many."""
    places = [place for place in _untied(model, linear_places(model)) if _has_sparse_kernel(place.layer)]
    exchange(places, lambda layer: SparseLinear(weight_of(layer).contiguous(), layer.bias))
    return len(places)


def prune(weight: torch.Tensor, sparsity: float, structure: Structure) -> None:
    """Zeroes the smallest of `weight`, [outputs, inner], in place: exactly as many as asked for, the first of equals.

    Unstructured that is the share `sparsity` of all, 2:4 two of every four inputs in a row. `weight` may be a view.
    """
    with torch.no_grad():
        size = weight.abs()
        if structure == "2:4":
            order = size.reshape(size.shape[0], -1, GROUP).argsort(dim=-1, stable=True)
            mask = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., : GROUP // 2], True)
        else:
            mask = _smallest(size, round(sparsity * size.numel()))
        weight.masked_fill_(mask.reshape(size.shape), 0)


def _smallest(size: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of the `count` smallest numbers; 16-bit weights have many equal ones, of which the first are taken."""
    if count == 0:
        return torch.zeros_like(size, dtype=torch.bool)
    flat = size.flatten()
    limit = flat.kthvalue(count).values
    mask = flat < limit
    equal = (flat == limit).nonzero()[:, 0]
    mask[equal[: count - int(mask.sum())]] = True
    return mask


def _untied(model: PreTrainedModel, places: list[Place]) -> list[Place]:
    """Without a head that shares its weights with an embedding."""
    tables = {
        storage_of(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    return [place for place in places if storage_of(weight_of(place.layer)) not in tables]


def _has_sparse_kernel(layer: LinearLayer) -> bool:
    """Whether torch has a 2:4 kernel for such a layer: 16 bits, sizes that fill its tiles, and a GPU since Ampere."""
    outputs, inner = weight_of(layer).shape
    fits = outputs % SPARSE_ROWS == 0 and inner % SPARSE_INNER == 0
    is_half = layer.weight.dtype in (torch.float16, torch.bfloat16)
    is_nvidia = torch.version.hip is None
    return fits and is_half and is_nvidia and torch.cuda.get_device_capability(layer.weight.device) >= AMPERE
