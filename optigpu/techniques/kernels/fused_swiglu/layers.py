"""A gated MLP with one matrix for gate and up, and one kernel for its activation and product."""

import torch
from transformers import PreTrainedModel

from optigpu.models.families import FAMILIES, Mlp
from optigpu.ops.activation.fused_activation import swiglu
from optigpu.surgery.fused_blocks import activation_kernels, joined, kind_of, modules_of, require_mergeable
from optigpu.surgery.places import Place, linear_of
from optigpu.vocabulary import UnsupportedError

GATED = [family for family in FAMILIES.values() if family.mlp and family.mlp.gate]
MLPS: dict[str, Mlp] = {mlp.kind: mlp for family in GATED for mlp in family.mlps}
"""By transformers' class of modules that compute down(activation(gate(x)) * up(x))."""
_SILU = ("SiLU", "SiLUActivation")


class SwigluMlp(torch.nn.Module):
    """down_proj(silu(gate) * up), where gate_up_proj(x) + bias = [gate | up].

    The bias, where there is one, is added with the activation and not with the matrix product.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        names = _names(mlp)
        merged = joined([getattr(mlp, str(names.gate)), getattr(mlp, names.up)])
        self.gate_up_proj = linear_of(merged.weight, None)
        self.register_parameter("bias", merged.bias)
        self.down_proj = getattr(mlp, names.down)
        self.train(mlp.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(swiglu(self.gate_up_proj(x), self.bias))
        return y


def fuse(model: PreTrainedModel, technique: str) -> dict[str, int | str]:
    """Replaces every gated MLP in place; returns what is recorded of it.

    Raises UnsupportedError, with the model left as it was.
    """
    places = modules_of(model, MLPS)
    if not places:
        known = ", ".join(family.title for family in GATED)
        raise UnsupportedError(
            f"{technique} supports the gated MLPs of {known}, and this {model.config.model_type} model has none of "
            "them; leave it out of the stack."
        )
    pairs = []
    for place in places:
        names = _names(place.layer)
        two = (str(names.gate), names.up)
        pairs.append([Place(f"{place.path}.{name}", place.layer, name) for name in two])
        gate = type(getattr(place.layer, names.activation)).__name__
        if gate not in _SILU:
            raise UnsupportedError(
                f"{technique} needs the activation SiLU, and {place.path} has {gate}; leave it out of the stack."
            )
    require_mergeable(model, technique, pairs)
    backend = activation_kernels(technique, model.device)
    for place in places:
        place.put(SwigluMlp(place.layer))
    return {"fused_swiglu_layers": len(places), "activation_backend": backend}


def _names(mlp: torch.nn.Module) -> Mlp:
    return MLPS[kind_of(mlp, MLPS)]
