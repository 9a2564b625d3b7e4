"""Functions for techniques that fuse parts of attentions and MLPs, above all merging linear layers into one."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from optigpu.models.loading.storages import storage_of
from optigpu.ops.activation.fused_activation import activation_backend, activation_reason
from optigpu.surgery.places import Place, linear_of, places_of
from optigpu.vocabulary import UnsupportedError


def modules_of(model: torch.nn.Module, kinds: Collection[str]) -> list[Place]:
    """The places of modules whose class, or one of its base classes, has one of these names; in the model's order."""
    return places_of(model, lambda module: bool(kind_of(module, kinds)))


def kind_of(module: torch.nn.Module, kinds: Collection[str]) -> str:
    """The one of these names that a module's class or its nearest base class has; "" if none has."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((name for name in names if name in kinds), "")


def require_mergeable(model: torch.nn.Module, technique: str, groups: Sequence[Sequence[Place]]) -> None:
    """Checks every group of layers that is to be merged into one, before any is changed.

    Raises UnsupportedError for a layer that is no plain torch Linear, for layers of a group that differ in dtype,
    device, inputs or in whether they have a bias, and for a parameter that is shared.
    """
    seen = Counter(storage_of(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    shared = {storage for storage, uses in seen.items() if uses > 1}
    for group in groups:
        for place in group:
            if type(place.layer) is not torch.nn.Linear:
                raise UnsupportedError(
                    f"{technique} merges plain torch Linear layers, and {place.path} is a "
                    f"{type(place.layer).__name__}; weights are merged before they are quantized or adapted, so leave "
                    "out what changed it."
                )
            if {storage_of(parameter) for parameter in place.layer.parameters()} & shared:
                raise UnsupportedError(
                    f"{technique}: {place.path} shares its weights with another layer, and a merged copy would not; "
                    "leave it out of the stack."
                )
        if len({_likeness(place.layer) for place in group}) > 1:
            raise UnsupportedError(
                f"{technique}: {' and '.join(place.path for place in group)} differ in dtype, device, inputs or bias, "
                "so they cannot become one matrix; leave it out of the stack."
            )


def _likeness(layer: torch.nn.Module) -> tuple[object, ...]:
    kinds = frozenset((parameter.dtype, parameter.device) for parameter in layer.parameters())
    return kinds, layer.in_features, layer.bias is None


def activation_kernels(technique: str, device: torch.device) -> str:
    """The backend of fused activations on `device`. Raises UnsupportedError if that is plain torch."""
    reason = activation_reason(device)
    if reason is not None:
        raise UnsupportedError(f"{technique} has no kernel here. {reason}")
    return activation_backend(device)


def joined(layers: Sequence[torch.nn.Linear]) -> torch.nn.Linear:
    """One torch Linear whose outputs are those of `layers`, one after the other: copies of weights and biases."""
    trained = layers[0].weight.requires_grad
    with torch.no_grad():
        weight = torch.cat([layer.weight for layer in layers])
        found = (dict(layer.named_parameters()).get("bias") for layer in layers)
        biases: list[torch.Tensor] = [bias for bias in found if bias is not None]
        bias = torch.cat(biases) if biases else None
    return linear_of(weight, bias, trained).train(layers[0].training)
