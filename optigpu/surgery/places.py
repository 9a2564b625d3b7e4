"""The linear layers of a model, as the techniques that replace them find, check and exchange them.

Works inside the measuring process alone, on a loaded model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from optigpu.vocabulary import UnsupportedError


@dataclass(frozen=True)
class Place:
    """Where a layer stands: its path from the model ("transformer.h.0.mlp.c_fc"), its parent, its name there."""

    path: str
    parent: Any
    name: str

    @property
    def layer(self) -> Any:
        """What stands there now."""
        return getattr(self.parent, self.name)

    def put(self, layer: Any) -> None:
        """Exchanges it, in the state (training or not) of what stood there."""
        setattr(self.parent, self.name, layer.train(self.layer.training))


def linear_places(model: Any) -> list[Place]:
    """Every torch Linear and every Conv1D of GPT-2, the head included, in the model's own order.

    Layers that a library has quantized already are subclasses of Linear and are not among them.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    return [
        Place(f"{path}.{name}" if path else name, parent, name)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) in (Linear, Conv1D)
    ]


def weight_of(layer: Any) -> Any:
    """The weight of a Linear or a Conv1D as [outputs, inner]; a view, so that a tied head stays recognisable."""
    from transformers.pytorch_utils import Conv1D

    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def checked_places(model: Any, technique: str, group: int = 1) -> list[Place]:
    """The linear layers that a quantization is about to replace, all of them looked at before any is touched.

    `group` is what the number of inputs of each must be a multiple of. Raises UnsupportedError, with the model left as
    it was, when there is none, when the model is quantized already, when a weight is NaN or infinite, and when a
    layer's inputs do not divide.
    """
    require_unquantized(model, technique)
    places = linear_places(model)
    if not places:
        raise UnsupportedError(f"{technique} found no linear layer in this model; leave it out of the stack.")
    for place in places:
        weight = weight_of(place.layer)
        if weight.shape[1] % group:
            raise UnsupportedError(
                f"{technique}: {place.path} has {weight.shape[1]} inputs, which groups of {group} do not divide; take "
                "another group size or leave it out."
            )
        if not bool(weight.isfinite().all()):
            raise UnsupportedError(
                f"{technique}: the weights of {place.path} are not all finite numbers; the model's files are damaged."
            )
    return places


def require_unquantized(model: Any, technique: str) -> None:
    """Raises UnsupportedError when a model's weights were quantized before, by us or by the library it came from."""
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    ours = next((type(module).__name__ for module in model.modules() if is_quantized(module)), None)
    if method is not None or ours is not None:
        raise UnsupportedError(
            f"{technique}: the model is quantized already ({ours or 'its configuration says so'}); weights are "
            "quantized once."
        )


def is_quantized(module: Any) -> bool:
    """Whether a module holds quantized weights: ours say so by an attribute."""
    return bool(getattr(module, "holds_quantized_weights", False))


def exchange(places: Iterable[Place], make: Callable[[Any], Any]) -> None:
    """Puts `make(layer)` where each layer stood, one after the other, so that only one of them is there twice."""
    for place in places:
        place.put(make(place.layer))
