"""An MLP's linear layer without its bias, and the activation that adds it."""

from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optigpu.models.families import FAMILIES
from optigpu.ops.activation.fused_activation import bias_gelu
from optigpu.surgery.fused_blocks import activation_kernels, kind_of, modules_of
from optigpu.surgery.places import Place, linear_of, weight_of
from optigpu.vocabulary import UnsupportedError

Form = Literal["none", "tanh"]
FAMILIES_WITH_GELU = [family for family in FAMILIES.values() if family.mlp and not family.mlp.gate]
MLPS = {mlp.kind: (mlp.up, mlp.activation) for family in FAMILIES_WITH_GELU for mlp in family.mlps}
"""By transformers' class of the module: its names for a linear layer and for the activation after it."""
_FORMS: dict[str, Form] = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "GELUTanh": "tanh",
}
"""transformers' classes that are GELU, and torch's name for the form that they compute."""


class BiasGelu(torch.nn.Module):
    """gelu(x + bias), in the dtype of x."""

    bias: torch.nn.Parameter | None

    def __init__(self, bias: torch.nn.Parameter | None, approximate: Form) -> None:
        super().__init__()
        self.register_parameter("bias", bias)
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bias_gelu(x, self.bias, self.approximate)


def fuse(model: PreTrainedModel, technique: str) -> dict[str, int | str]:
    """Replaces the linear layer and the activation of every MLP in place; returns what is recorded of it.

    Raises UnsupportedError, with the model left as it was.
    """
    pairs = []
    for place in modules_of(model, MLPS):
        mlp = place.layer
        up, act = (Place(f"{place.path}.{name}", mlp, name) for name in MLPS[kind_of(mlp, MLPS)])
        _require(technique, up, act)
        pairs.append((up, act, _FORMS[type(act.layer).__name__]))
    if not pairs:
        known = ", ".join(family.title for family in FAMILIES_WITH_GELU)
        raise UnsupportedError(
            f"{technique} supports the MLPs of {known}, and this {model.config.model_type} model has none of them; "
            "leave it out of the stack."
        )
    forms = "+".join(sorted({form for *_, form in pairs}))
    backend = activation_kernels(technique, model.device)
    for linear, activation, form in pairs:
        activation.put(BiasGelu(linear.layer.bias, form))
        weight = linear.layer.weight
        # Of a Conv1D a view, so that nothing is copied or laid out anew.
        if isinstance(linear.layer, Conv1D):
            weight = torch.nn.Parameter(weight_of(linear.layer).detach(), weight.requires_grad)
        linear.put(linear_of(weight, None))
    return {"fused_gelu_layers": len(pairs), "gelu": forms, "activation_backend": backend}


def _require(technique: str, linear: Place, activation: Place) -> None:
    if type(activation.layer).__name__ not in _FORMS:
        raise UnsupportedError(
            f"{technique} needs GELU, and the activation {activation.path} is {type(activation.layer).__name__}; leave "
            "it out of the stack."
        )
    if type(linear.layer) not in (torch.nn.Linear, Conv1D):
        raise UnsupportedError(
            f"{technique} takes the bias out of plain linear layers, and {linear.path} is a "
            f"{type(linear.layer).__name__}; kernels are fused before weights are quantized or adapted, so leave out "
            "what changed it."
        )
