"""What the techniques share that fuse parts of attentions and MLPs: above all, linear layers merged into one.

Works inside the measuring process alone, on a loaded model.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from optigpu.surgery.places import Place
from optigpu.vocabulary import UnsupportedError


def modules_of(model: Any, kinds: Collection[str]) -> list[Place]:
    """Where modules stand whose class, or a class that it is made of, has one of these names; in the model's order."""
    return [
        Place(f"{path}.{name}" if path else name, parent, name)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if kind_of(child, kinds)
    ]


def kind_of(module: Any, kinds: Collection[str]) -> str:
    """Which of these names a module's class has, or the nearest class that it is made of; "" where it has none."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((name for name in names if name in kinds), "")


def require_mergeable(model: Any, technique: str, groups: Sequence[Sequence[Place]]) -> None:
    """Looks at every group of layers that is to be merged into one, before any is touched.

    Raises UnsupportedError when a layer is no plain torch Linear, when the layers of a group differ in dtype, device,
    inputs or in whether they have a bias, and when a parameter is shared: a merged copy of it would be a second one.
    """
    shared = _shared_storages(model)
    for group in groups:
        for place in group:
            _require_plain(technique, place)
            if {_storage(parameter) for parameter in place.layer.parameters()} & shared:
                raise UnsupportedError(
                    f"{technique}: {place.path} shares its weights with another layer, and a merged copy would not; "
                    "leave it out."
                )
        if len({_likeness(place.layer) for place in group}) > 1:
            raise UnsupportedError(
                f"{technique}: {' and '.join(place.path for place in group)} differ in dtype, device, inputs or bias, "
                "so they cannot become one matrix; leave it out."
            )


def activation_kernels(technique: str, device: Any) -> str:
    """The name of what runs fused activations on `device`.

    Raises UnsupportedError where that is plain torch, which fuses nothing.
    """
    from optigpu.ops.activation.fused_activation import activation_backend, activation_reason

    reason = activation_reason(device)
    if reason is not None:
        raise UnsupportedError(f"{technique} has no kernel here. {reason}")
    return activation_backend(device)


def joined(layers: Sequence[Any]) -> Any:
    """One torch Linear whose outputs are those of `layers`, one after the other: copies of weights and biases."""
    import torch

    with torch.no_grad():
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    trained = layers[0].weight.requires_grad
    parameters = (
        tensor if tensor is None else torch.nn.Parameter(tensor, trained) for tensor in (weight, bias)
    )
    return linear_of(*parameters).train(layers[0].training)


def linear_of(weight: Any, bias: Any) -> Any:
    """A torch Linear around a parameter [outputs, inner] and a parameter [outputs], or None; nothing is copied."""
    import torch

    outputs, inner = weight.shape
    linear = torch.nn.Linear(inner, outputs, bias=False, device="meta")  # nothing is drawn or allocated there
    linear.weight = weight
    linear.bias = bias
    return linear


def _require_plain(technique: str, place: Place) -> None:
    from torch.nn import Linear

    if type(place.layer) is not Linear:
        raise UnsupportedError(
            f"{technique}: {place.path} is a {type(place.layer).__name__} and no plain Linear of torch, so it "
            "cannot be merged; weights are merged before they are quantized or adapted."
        )


def _likeness(layer: Any) -> tuple[Any, ...]:
    """What layers must have in common to be merged."""
    kinds = {(parameter.dtype, parameter.device) for parameter in layer.parameters()}
    return (frozenset(kinds), layer.in_features, layer.bias is None)


def _shared_storages(model: Any) -> set[int]:
    seen = Counter(_storage(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {storage for storage, uses in seen.items() if uses > 1}


def _storage(parameter: Any) -> int:
    return int(parameter.untyped_storage().data_ptr())
