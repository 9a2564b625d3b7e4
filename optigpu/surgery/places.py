"""The parts of a loaded model, as the techniques that replace them find, check and exchange them."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optigpu.surgery.experts import OpenedExperts, opened
from optigpu.surgery.read_layers import read_layers
from optigpu.vocabulary import UnsupportedError

LinearLayer = torch.nn.Linear | Conv1D
Mixin = TypeVar("Mixin", bound=torch.nn.Module)


@dataclass(frozen=True)
class Place:
    """The place of a layer: its path from the model ("transformer.h.0.mlp.c_fc"), its parent, its name in the
    parent."""

    path: str
    parent: torch.nn.Module
    name: str

    @property
    def layer(self) -> LinearLayer:
        """The module at this place; a linear layer unless another kind was searched for."""
        found: LinearLayer = getattr(self.parent, self.name)
        return found

    def put(self, layer: torch.nn.Module) -> None:
        """Replaces the module; the new one gets the old one's state (training or not)."""
        setattr(self.parent, self.name, layer.train(self.layer.training))


@dataclass(frozen=True)
class ExpertPlace(Place):
    """The place of an expert's matrix. The model keeps its own module at `within` until a first layer is put here; then
    that becomes `experts`, whose other layers are views of what the model had.
    """

    within: Place
    experts: OpenedExperts

    def put(self, layer: torch.nn.Module) -> None:
        """Replaces the layer."""
        super().put(layer)
        current: torch.nn.Module = self.within.layer
        if current is not self.experts:
            self.within.put(self.experts)


def places_of(model: torch.nn.Module, wanted: Callable[[torch.nn.Module], bool]) -> list[Place]:
    """The places of the wanted modules, in the model's own order, without the model itself."""
    return [
        Place(f"{path}.{name}" if path else name, parent, name)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if wanted(child)
    ]


def linear_places(model: torch.nn.Module) -> list[Place]:
    """Every torch Linear and every Conv1D of transformers, the head included.

    Layers that a library has quantized already are subclasses of Linear and are not among them.
    """
    return places_of(model, lambda module: type(module) in (torch.nn.Linear, Conv1D))


def expert_places(model: torch.nn.Module) -> list[Place]:
    """Every matrix of the experts that transformers holds as tensors [experts, outputs, inner], as a linear layer."""
    found = ((within, opened(within.layer)) for within in places_of(model, lambda _: True))
    return [
        ExpertPlace(f"{within.path}.{name}.{number}", layers, number, within, experts)
        for within, experts in found
        if experts is not None
        for name, layers in experts.lists()
        for number, _ in layers.named_children()
    ]


def weight_of(layer: torch.nn.Module) -> torch.Tensor:
    """The weight of a Linear, an Embedding or a Conv1D as [outputs, inner]; a view, so that a tied head stays
    recognisable.
    """
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.T if isinstance(layer, Conv1D) else weight


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory: the same for what is tied and for views."""
    return tensor.untyped_storage().data_ptr()


def checked_places(model: PreTrainedModel, technique: str, group: int = 1) -> list[Place]:
    """The linear layers that a quantization will replace, those of experts included; all of them are checked before any
    is changed.

    Those whose weights the model reads by itself are not among them (`read_layers`). `group` is what the number of
    inputs of each must be a multiple of. Raises UnsupportedError, with the model left as it was, when there is none,
    when the model is quantized already, when a weight is NaN or infinite, and when a layer's inputs are not a multiple
    of the group.
    """
    require_unquantized(model, technique)
    places = _replaceable(model, [*expert_places(model), *linear_places(model)])
    if not places:
        raise UnsupportedError(f"{technique} found no linear layer in this model; leave it out of the stack.")
    for place in places:
        weight = weight_of(place.layer)
        if weight.shape[1] % group:
            raise UnsupportedError(
                f"{technique} needs layers whose inputs are a multiple of {group}; {place.path} has "
                f"{weight.shape[1]}. Choose another group size, or leave it out of the stack."
            )
        if not bool(weight.isfinite().all()):
            raise UnsupportedError(damaged(technique, place.path))
    return places


def _replaceable(model: PreTrainedModel, places: list[Place]) -> list[Place]:
    """The places without those of layers, or of experts, that the model reads more of than what they compute."""
    if not places:
        return places
    kept = read_layers(model, [_exchanged(place) for place in places])
    return [place for place in places if _exchanged(place) not in kept]


def _exchanged(place: Place) -> torch.nn.Module:
    """The model's own module that something else will stand for."""
    return place.within.layer if isinstance(place, ExpertPlace) else place.layer


def places_but_the_head(model: PreTrainedModel, technique: str, group: int = 1) -> list[Place]:
    """The linear layers but the head, as transformers chooses what bitsandbytes quantizes.

    A model without a language model's head keeps its last linear layer. Raises UnsupportedError as `checked_places`
    does, and when there is no layer but the head.
    """
    places = checked_places(model, technique, group)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept = places[-1].layer if head is None else head
    rest = [place for place in places if place.layer is not kept]
    if not rest:
        raise UnsupportedError(
            f"{technique} leaves the head as it is, and this model has no other linear layer; leave it out of the "
            "stack."
        )
    return rest


def damaged(technique: str, path: str) -> str:
    """The error's sentence for a layer with weights that are NaN or infinite."""
    return f"{technique}: {path} has weights that are NaN or infinite; the model's files are damaged."


def require_unquantized(model: PreTrainedModel, technique: str) -> None:
    """Raises UnsupportedError when a model's weights were quantized before, by us or by the library it came from."""
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    ours = next((type(module).__name__ for module in model.modules() if is_quantized(module)), None)
    if method is not None or ours is not None:
        raise UnsupportedError(
            f"{technique}: this model is quantized already ({ours or 'its configuration says so'}), and weights can be "
            "quantized only once; leave one of the two out of the stack."
        )


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether a module holds quantized weights: ours say so by an attribute."""
    return bool(getattr(module, "holds_quantized_weights", False))


def exchange(places: Iterable[Place], make: Callable[[LinearLayer], torch.nn.Module]) -> None:
    """Replaces each layer by `make(layer)`, one after the other, so that only one of them is in memory twice."""
    for place in places:
        place.put(make(place.layer))


def become(module: torch.nn.Module, mixin: type[Mixin], **about: Hashable) -> Mixin:
    """Makes a module an instance of its own class with `mixin` before it, whose methods then come first.

    It stays an instance of its class, by which transformers finds the parts of a model, and keeps its weights. `about`
    are attributes of the new class.
    """
    module.__class__ = _mixed(mixin, type(module), about)
    assert isinstance(module, mixin)
    return module


_MIXED: dict[tuple[object, ...], type[torch.nn.Module]] = {}
"""One class for each pair, so that torch.compile finds the code of a class again."""


def _mixed(
    mixin: type[torch.nn.Module], kind: type[torch.nn.Module], about: Mapping[str, Hashable]
) -> type[torch.nn.Module]:
    key = (mixin, kind, *about.items())
    if key not in _MIXED:
        _MIXED[key] = type(f"{mixin.__name__}Of{kind.__name__}", (mixin, kind), dict(about))
    return _MIXED[key]
