"""fused_gelu: the bias before an MLP's GELU and the GELU in one kernel."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.models.facts import ModelFacts
from optigpu.surgery.merging import activation_kernels, kind_of, linear_of, modules_of
from optigpu.surgery.places import Place, weight_of
from optigpu.techniques.base import ON_MODELS, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task, UnsupportedError

_MLPS = {
    "GPT2MLP": ("c_fc", "act"),
    "OPTDecoderLayer": ("fc1", "activation_fn"),
    "ViTMLP": ("fc1", "activation_fn"),
    "ViTIntermediate": ("dense", "intermediate_act_fn"),
}
"""transformers' modules in which an activation follows a linear layer, and what they call the two."""
_FORMS: dict[str, Literal["none", "tanh"]] = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "GELUTanh": "tanh",
}
"""transformers' classes that are GELU, and torch's name for the form that they compute."""


class FusedGelu(Technique):
    """Replaces each MLP's activation by one that adds the bias itself, and its linear layer by one without a bias."""

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = "bias and GELU of an MLP in one kernel: one pass over its widest activation"
    citation: ClassVar[str] = (
        "Aminabadi et al., DeepSpeed Inference, 2022, arXiv:2207.00032 (fusing element-wise operators); "
        "GELU: Hendrycks and Gimpel, 2016, arXiv:1606.08415"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "grad_enabled": "the fused activation has no gradient",
        "cpu_offload": "its kernel is chosen for the device that the weights are loaded on",
    }
    expected: ClassVar[str] = (
        "a few percent of an eager step, where the library's GELU is eight operators; nothing under torch_compile, "
        "which fuses them itself"
    )

    name: Literal["fused_gelu"] = "fused_gelu"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The MLP must not be gated, and a CPU needs a compiler for the operator."""
        if device is DeviceKind.CPU and environment.compiler is None:
            return f"{self.name} is a C++ operator on a CPU and there is no compiler; install g++."
        if model is not None and model.gated_mlp:
            return (
                f"The MLP of {model.family} is gated and has no GELU of its own; take fused_swiglu instead."
            )
        return None

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """What it replaces is fused by torch_compile as well, and the activation is a small part of a step."""
        return False

    def modules(self, model: Any, notes: Notes) -> None:
        """Replaces the linear layer and the activation of every MLP in place; the weights stay where they are.

        Raises UnsupportedError when there is no MLP that it knows, when its activation is not GELU, when the layer
        before that is neither a torch Linear nor GPT-2's Conv1D, and where there is no kernel but torch's own.
        """
        pairs = [_pair(place) for place in modules_of(model, _MLPS)]
        if not pairs:
            raise UnsupportedError(
                f"{self.name} knows the GELU of GPT-2, OPT and ViT, and {model.config.model_type} has none of their "
                "MLPs; leave it out."
            )
        for linear, activation in pairs:
            _require(self.name, linear, activation)
        forms = sorted({_form(activation.layer) for _, activation in pairs})
        backend = activation_kernels(self.name, model.device)
        for linear, activation in pairs:
            activation.put(_bias_gelu_class()(linear.layer.bias, _form(activation.layer)))
            linear.put(_without_bias(linear.layer))
        notes.record(fused_gelu_layers=len(pairs), gelu="+".join(forms), activation_backend=backend)


def _pair(place: Place) -> tuple[Place, Place]:
    """Where the linear layer and the activation of an MLP stand."""
    mlp = place.layer
    names = _MLPS[kind_of(mlp, _MLPS)]
    linear, activation = (Place(f"{place.path}.{name}", mlp, name) for name in names)
    return linear, activation


def _require(technique: str, linear: Place, activation: Place) -> None:
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    if type(activation.layer).__name__ not in _FORMS:
        raise UnsupportedError(
            f"{technique}: the activation {activation.path} is a {type(activation.layer).__name__} and not GELU; leave "
            "it out."
        )
    if type(linear.layer) not in (Linear, Conv1D):
        raise UnsupportedError(
            f"{technique}: {linear.path} is a {type(linear.layer).__name__} and no plain linear layer, so its bias "
            "cannot be taken out; kernels are fused before weights are quantized or adapted."
        )


def _form(activation: Any) -> Literal["none", "tanh"]:
    return _FORMS[type(activation).__name__]


def _without_bias(layer: Any) -> Any:
    """A torch Linear over the same weight: for a Conv1D over a view, so that nothing is copied or laid out anew."""
    import torch

    weight = layer.weight
    if not isinstance(layer, torch.nn.Linear):
        weight = torch.nn.Parameter(weight_of(layer).detach(), weight.requires_grad)
    return linear_of(weight, None)


@functools.cache
def _bias_gelu_class() -> Any:
    """Made at its first use, because its base class is torch's."""
    import torch

    from optigpu.ops import bias_gelu

    class BiasGelu(torch.nn.Module):
        """gelu(x + bias), in the dtype of x."""

        bias: torch.nn.Parameter | None

        def __init__(self, bias: torch.nn.Parameter | None, approximate: Literal["none", "tanh"]) -> None:
            super().__init__()
            self.register_parameter("bias", bias)
            self.approximate = approximate

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return bias_gelu(x, self.bias, self.approximate)

    return BiasGelu
