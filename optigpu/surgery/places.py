"""The parts of a loaded model, as the techniques that replace them find, check and exchange them.

And layers of which a model reads more than what they compute, such as a weight that it multiplies with by itself.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.nn import Linear, Module, ModuleList, Parameter
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optigpu.models.described import image_facts_from_config
from optigpu.models.loading.self_written import forked_random
from optigpu.ops.operands import is_finite
from optigpu.vocabulary import UnsupportedError

TOKENS, NEW_TOKENS = 2, 2


class _Watched(Module):
    """In the place of a module: it computes the same, and notes that the model asked for anything else."""

    def __init__(self, watched: Module) -> None:
        super().__init__()
        self.watched = watched
        self.was_read = False

    def forward(self, *given: object, **named: object) -> object:
        return self.watched(*given, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("watched"), name)
            self.was_read = True
            return found


def read_layers(model: Module, layers: Collection[Module]) -> set[Module]:
    """Those of the layers whose attributes the model reads, so that no other layer can stand for them.

    Runs the model on a short text or an image, and leaves it and torch's random state as they were. Empty for a model
    that is not transformers', or that takes something else (sound).
    """
    if not isinstance(model, PreTrainedModel):
        return set()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with (
            _watched(model, set(layers)) as watched,
            torch.no_grad(),
            forked_random(model.device),
            suppress(Exception),  # of the model's own code, given what it may not take
        ):
            _run(model)
    finally:
        for module, training in modes:
            module.training = training
    return {each.watched for each in watched if each.was_read}


@contextmanager
def _watched(model: Module, layers: set[Module]) -> Iterator[list[_Watched]]:
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if child in layers
    ]
    watched = {child: _Watched(child) for _, _, child in places}
    for parent, name, child in places:
        parent._modules[name] = watched[child]
    try:
        yield list(watched.values())
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _run(model: PreTrainedModel) -> None:
    """A pass over a prompt and a step, or one over an image."""
    if model.can_generate():
        ids = torch.arange(1, TOKENS + 1, device=model.device)[None]
        generate: Any = model.generate
        asked = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)
        return
    facts = image_facts_from_config(model.config.model_type, model.config.to_dict() | {"num_labels": 1})
    side = facts.image_size
    model(pixel_values=torch.zeros(1, facts.channels, side, side, dtype=model.dtype, device=model.device))


UP, DOWN, LONE = ("gate_up_proj", "up_proj"), "down_proj", "weight"
"""transformers' names of the tensor before the activation, of the one after it, and of one without an activation."""
GATED = ("gate_proj", "up_proj", "down_proj")
"""Its names where the gate has a tensor of its own."""
FLAT = ("w1", "v1", "w2")
"""DBRX's names of the same three: [experts * inner, width] each, in a module within that of the experts."""


class OpenedExperts(Module):
    """Experts as linear layers: lists of views under transformers' names, and `rest`, its module without matrices."""

    def __init__(self, experts: Module) -> None:
        super().__init__()
        for name, stack in _stacks(experts).items():
            self.add_module(name, _layers(stack, getattr(experts, f"{name}_bias", None)))
        holder = _holder(experts)
        gone = {name for stack in (*UP, *GATED, *FLAT, LONE) for name in (stack, f"{stack}_bias")}
        self.rest: Any = copy.copy(holder)
        self.rest._parameters = {name: own for name, own in holder._parameters.items() if name not in gone}
        self.train(experts.training)

    def lists(self) -> list[tuple[str, ModuleList]]:
        """Each list of linear layers with its name: what comes before the activation first."""
        return [(name, part) for name, part in self.named_children() if isinstance(part, ModuleList)]

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """What one expert makes of x, [tokens, width]; one that has no matrices returns x."""
        *before, down = (layers for _, layers in self.lists())
        if number >= len(down):
            return x
        y: torch.Tensor = down[number](self._inner(*(layers[number](x) for layers in before)))
        return self.rest.post_expert_norm(y) if hasattr(self.rest, "post_expert_norm") else y

    def _inner(self, *products: torch.Tensor) -> torch.Tensor:
        """The gated products, [tokens, inner], of one matrix or of a gate's and another one."""
        activated: torch.Tensor
        if len(products) == 2:
            gate, up = products
            activation = self.rest.act_fn if hasattr(self.rest, "act_fn") else self.rest.activation_fn
            activated = activation(gate) * up
        elif not getattr(self.rest, "has_gate", True):
            activated = self.rest.act_fn(*products)
        elif hasattr(self.rest, "_apply_gate"):
            activated = self.rest._apply_gate(*products)
        else:
            gate, up = products[0].chunk(2, dim=-1)
            activated = self.rest.act_fn(gate) * up
        return activated


class RoutedExperts(OpenedExperts):
    """Experts that are told which tokens are theirs."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum over a token's experts of weight * expert(x), [..., width].

        x: [..., width]; indices (int64) and weights: [tokens, experts of each].
        """
        return self._routed(x.reshape(-1, x.shape[-1]), indices, weights).reshape(x.shape)

    def _routed(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `forward`, x: [tokens, width]."""
        traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        recorded = torch.compiler.is_compiling() or traced
        if recorded or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            # No shape may depend on the indices, so every expert computes every token.
            share = torch.where(indices == 0, weights, 0).sum(dim=-1, keepdim=True)
            total = self.expert(0, x) * share
            for number in range(1, len(self.lists()[0][1])):
                share = torch.where(indices == number, weights, 0).sum(dim=-1, keepdim=True)
                total = total + self.expert(number, x) * share
            return total.to(x.dtype)
        total = torch.zeros_like(x)
        for number in indices.unique().tolist():
            tokens, places = torch.where(indices == number)
            y = self.expert(number, x[tokens]) * weights[tokens, places, None]
            total.index_add_(0, tokens, y.to(x.dtype))
        return total


class SharedExperts(OpenedExperts):
    """Experts that all compute every token."""

    def forward(self, x: torch.Tensor, gammas: torch.Tensor) -> torch.Tensor:
        """The sum of gamma * expert(x) in float32, in the dtype of x. x: [..., width]; gammas: [tokens, experts]."""
        shares = gammas.reshape(*x.shape[:-1], -1, 1)
        *before, down = (layers for _, layers in self.lists())
        inner = (self._inner(*(layers[number](x) for layers in before)) for number in range(len(down)))
        parts = (
            layer(each * shares[..., n, :]) for n, (layer, each) in enumerate(zip(down, inner, strict=True))
        )
        return torch.stack([part.float() for part in parts]).sum(dim=0).to(x.dtype)


class ExpertsInTurn(OpenedExperts):
    """Experts that each get an equal share of the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [experts * tokens, width], the first expert's tokens first; returns as much."""
        parts = x.chunk(len(self.lists()[1][1]))
        return torch.cat([self.expert(number, part) for number, part in enumerate(parts)])


class ExpertProducts(OpenedExperts):
    """One product for each expert, of as many rows as it is told."""

    def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        """inputs: [rows, inner], the first expert's rows first; returns [rows, outputs]."""
        layers = self.lists()[0][1]
        parts = zip(layers, inputs.split(expert_size), strict=True)
        return torch.cat([layer(part) for layer, part in parts if len(part)])


def opened(module: Module) -> OpenedExperts | None:
    """The experts of a module as linear layers, beside the module, which stays as it is; None for other modules."""
    stacks = _stacks(module)
    if not stacks:
        return None
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    if set(stacks) == {LONE}:
        return ExpertProducts(module) if "expert_size" in takes else None
    gated = len(stacks) == len(GATED)
    kind = {2: SharedExperts, 3: RoutedExperts} if gated else {1: ExpertsInTurn, 3: RoutedExperts}
    return kind[len(takes)](module) if len(takes) in kind else None


def _holder(module: Module) -> Module:
    """The module whose own parameters are the matrices: the experts' own, or the one within it."""
    within = dict(module.named_children()).get("mlp")
    return module if within is None or set(dict(within.named_parameters())) != set(FLAT) else within


def _stacks(module: Module) -> Mapping[str, torch.Tensor]:
    """All experts' matrices by transformers' names, as views [experts, outputs, inner], the one after the activation
    last. Empty where the module has none, or one that is not known here."""
    holder = _holder(module)
    own = dict(holder.named_parameters(recurse=False))
    if holder is not module:
        experts = len(own["w1"]) // cast("int", holder.ffn_hidden_size)
        w1, v1, w2 = (own[name].unflatten(0, (experts, -1)) for name in FLAT)
        return dict(zip(FLAT, (w1, v1, w2.mT), strict=True))
    names = [name for name, tensor in own.items() if tensor.dim() == 3]
    if set(names) not in ({LONE}, set(GATED), *({up, DOWN} for up in UP)):
        return {}
    ordered = [name for name in (*UP[:1], *GATED, LONE) if name in names]
    first, last = own[ordered[0]], own[ordered[-1]]
    turned = bool(getattr(module, "is_transposed", False))  # [experts, inner, outputs]
    if not hasattr(module, "is_transposed") and first is not last:
        # The width of tokens tells where the first tensor has a gate's outputs; without them nothing is transposed.
        turned = first.shape[1] == last.shape[2] and first.shape[2] != last.shape[1]
    return {name: own[name].mT if turned else own[name] for name in ordered}


def _layers(stack: torch.Tensor, biases: torch.Tensor | None) -> ModuleList:
    """Linear layers around views of a tensor [experts, outputs, inner] and, if there are any, of [experts, outputs]."""
    rows = [None] * len(stack) if biases is None else biases.detach()
    pairs = zip(stack.detach(), rows, strict=True)
    return ModuleList(linear_of(matrix, bias, stack.requires_grad) for matrix, bias in pairs)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, trained: bool = False) -> Linear:
    """A torch Linear around [outputs, inner] and [outputs], or None; nothing is copied, and parameters stay."""
    outputs, inner = weight.shape
    layer = Linear(inner, outputs, bias=False, device="meta")  # nothing is drawn or allocated there
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            made = tensor if isinstance(tensor, Parameter) else Parameter(tensor, trained)
            layer.register_parameter(name, made)
    return layer


_SAME = ("FalconLinear",)
"""transformers' subclasses of Linear that only write its product in another way."""
LinearLayer = torch.nn.Linear | Conv1D
Replacement = TypeVar("Replacement", bound=torch.nn.Module)


@dataclass(frozen=True)
class Place:
    """The place of a layer: its path from the model ("transformer.h.0.mlp.c_fc"), its parent, its name there."""

    path: str
    parent: torch.nn.Module
    name: str

    @property
    def layer(self) -> LinearLayer:
        found: LinearLayer = getattr(self.parent, self.name)
        return found

    def put(self, layer: torch.nn.Module) -> None:
        """Replaces the module; the new one trains or not as the old one did."""
        setattr(self.parent, self.name, layer.train(self.layer.training))


@dataclass(frozen=True)
class ExpertPlace(Place):
    """The place of an expert's matrix. The first layer that is put here puts `experts` in the place of the model's own
    module at `within`."""

    within: Place
    experts: OpenedExperts

    def put(self, layer: torch.nn.Module) -> None:
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
    """Every torch Linear and every Conv1D of transformers, the head included; of subclasses, which quantized layers
    are, those alone that compute the same."""
    return places_of(model, _is_linear)


def _is_linear(module: torch.nn.Module) -> bool:
    kind = type(module)
    return kind in (torch.nn.Linear, Conv1D) or (issubclass(kind, torch.nn.Linear) and kind.__name__ in _SAME)


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
    """The weight of a Linear, an Embedding or a Conv1D as [outputs, inner]; a view, so that a tied head is known."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.T if isinstance(layer, Conv1D) else weight


def checked_places(model: PreTrainedModel, technique: str, group: int = 1) -> list[Place]:
    """The linear layers that a quantization will replace, those of experts included, checked before any is changed.

    Those whose weights the model reads by itself are not among them (`read_layers`). Raises UnsupportedError, with the
    model left as it was, when there is none, when the model is quantized already, when a weight is NaN or infinite, and
    when a layer's inputs are not a multiple of `group`.
    """
    require_unquantized(model, technique)
    places = [*expert_places(model), *linear_places(model)]
    if places:
        kept = read_layers(model, [_exchanged(place) for place in places])
        places = [place for place in places if _exchanged(place) not in kept]
    if not places:
        raise UnsupportedError(f"{technique} found no linear layer in this model; leave it out of the stack.")
    for place in places:
        weight = weight_of(place.layer)
        if weight.shape[1] % group:
            raise UnsupportedError(
                f"{technique} needs layers whose inputs are a multiple of {group}; {place.path} has "
                f"{weight.shape[1]}. Choose another group size, or leave it out of the stack."
            )
        if not is_finite(weight):
            raise UnsupportedError(damaged(technique, place.path))
    return places


def _exchanged(place: Place) -> torch.nn.Module:
    """The model's own module that something else will stand for."""
    return place.within.layer if isinstance(place, ExpertPlace) else place.layer


def places_but_the_head(model: PreTrainedModel, technique: str, group: int = 1) -> list[Place]:
    """All linear layers but the head, or but the last. Raises UnsupportedError as `checked_places` does, or if none
    is left."""
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
    return f"{technique}: {path} has weights that are NaN or infinite; the model's files are damaged."


def require_unquantized(model: PreTrainedModel, technique: str) -> None:
    """Raises UnsupportedError when a model's weights were quantized before, by us or by the library it came from."""
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    # Modules of ours say so by an attribute.
    quantized = (module for module in model.modules() if getattr(module, "holds_quantized_weights", False))
    ours = next((type(module).__name__ for module in quantized), None)
    if method is not None or ours is not None:
        raise UnsupportedError(
            f"{technique}: this model is quantized already ({ours or 'its configuration says so'}), and weights can be "
            "quantized only once; leave one of the two out of the stack."
        )


def exchange(places: Iterable[Place], make: Callable[[LinearLayer], Replacement]) -> list[Replacement]:
    """Replaces each layer by `make(layer)`, one after the other, so that only one of them is in memory twice."""
    made = []
    for place in places:
        made.append(make(place.layer))
        place.put(made[-1])
    return made


def become(module: torch.nn.Module, mixin: type[Replacement], **about: Hashable) -> Replacement:
    """Makes a module an instance of its own class with `mixin`, whose methods come first, and attributes `about`."""
    kind = type(module)
    key = (mixin, kind, *about.items())
    if key not in _MIXED:
        _MIXED[key] = type(f"{mixin.__name__}Of{kind.__name__}", (mixin, kind), dict(about))
    module.__class__ = _MIXED[key]
    assert isinstance(module, mixin)
    return module


_MIXED: dict[tuple[object, ...], type[torch.nn.Module]] = {}
"""One class for each pair, so that torch.compile finds the code of a class again."""
