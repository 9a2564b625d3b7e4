"""Modules that fused attentions and MLPs have in the place of transformers', and the functions that put them there.

An attention has one matrix for queries, keys and values; what follows it is transformers' own: the model file's rotary
embedding, the cache, the attention function. A gated MLP has one matrix for gate and up, and one kernel for its
activation and product; another MLP has a linear layer without its bias, and an activation that adds it.
"""

import sys
from types import ModuleType
from typing import Any, Literal

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from optigpu.models.families import FAMILIES, AttentionParts, Forwards, Mlp, ModelFamily
from optigpu.ops.activation.fused_activation import bias_gelu, swiglu
from optigpu.surgery.fused_blocks import activation_kernels, joined, kind_of, modules_of, require_mergeable
from optigpu.surgery.places import Place, become, linear_of, weight_of
from optigpu.vocabulary import UnsupportedError

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ATTENTION_FAMILIES: dict[str, ModelFamily] = {
    family.attention.kind: family
    for family in FAMILIES.values()
    if family.attention and len(family.attention.qkv) == 3
}
"""By transformers' class of the attention."""


def fuse_attentions(model: torch.nn.Module, technique: str) -> int:
    """Merges every attention of a known class in place, one after the other; returns how many.

    Raises UnsupportedError, with the model left as it was, when the three matrices of one cannot become one.
    """
    places = [
        place
        for place in modules_of(model, ATTENTION_FAMILIES)
        if hasattr(place.layer, _parts(place.layer).qkv[0])
    ]
    threes = [
        [Place(f"{place.path}.{name}", place.layer, name) for name in _parts(place.layer).qkv]
        for place in places
    ]
    require_mergeable(model, technique, threes)
    for place in places:
        _fuse_attention(place.layer)
    return len(places)


class FusedQkvAttention(torch.nn.Module):
    """A mixin of an attention's class, whose three matrices are merged to `qkv_proj`.

    `source` is transformers' file that defines the attention, `window_in` as `models.families.AttentionParts` has it.
    """

    source: ModuleType
    window_in: Literal["config", "attention"] | None
    head_dim: int
    layer_idx: int
    scaling: float
    config: PreTrainedConfig
    qkv_proj: torch.nn.Linear
    qkv_heads: tuple[int, int, int]
    o_proj: torch.nn.Module
    out_proj: torch.nn.Module

    def cut(self, hidden: torch.Tensor) -> Heads:
        """Queries, keys and values of `hidden` ([batch, length, width]), each [batch, heads, length, head_dim]."""
        merged = self.qkv_proj(hidden)
        heads = merged.view(*hidden.shape[:-1], -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split(self.qkv_heads, dim=1)
        return query, key, value

    def attend(
        self, heads: Heads, mask: torch.Tensor | None, scaling: float, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention function that the model is set to, as the model's own file calls it.

        Returns [batch, length, heads * head_dim], and the weights where the function keeps them.
        """
        name = self.config._attn_implementation
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, self.source.eager_attention_forward)
        dropout = self.dropout if hasattr(self, "dropout") else self.attention_dropout
        output, weights = function(
            self, *heads, mask, dropout=dropout if self.training else 0.0, scaling=scaling, **more
        )
        return output.reshape(*output.shape[:2], -1).contiguous(), weights


class FusedRotaryAttention(FusedQkvAttention):
    """The attention of Llama and similar families."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.cut(hidden_states)
        query, key = self.source.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if self.window_in is not None:
            holder = self if self.window_in == "attention" else self.config
            more["sliding_window"] = getattr(holder, "sliding_window", None)
        output, weights = self.attend((query, key, value), attention_mask, self.scaling, **more)
        return self.o_proj(output), weights


class FusedOptAttention(FusedQkvAttention):
    """OPT scales the queries before anything else, and the attention function by one."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.cut(hidden_states)
        query = query * self.scaling
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = self.attend((query, key, value), attention_mask, 1.0, **more)
        return self.out_proj(output), weights


class FusedEncoderAttention(FusedQkvAttention):
    """An encoder's: no positions and no cache."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.attend(self.cut(hidden_states), attention_mask, self.scaling, **more)
        return self.o_proj(output), weights


_FORWARDS: dict[Forwards | None, type[FusedQkvAttention]] = {
    "llama": FusedRotaryAttention,
    "opt": FusedOptAttention,
    "vit": FusedEncoderAttention,
}
"""The class for each kind of forward function."""


def _parts(attention: torch.nn.Module) -> AttentionParts:
    found = ATTENTION_FAMILIES[kind_of(attention, ATTENTION_FAMILIES)].attention
    assert found is not None  # as KINDS has it
    return found


def _fuse_attention(attention: Any) -> None:
    """Gives one attention its merged matrix and the forward pass that uses it, and lets the separate ones go."""
    kind, parts = kind_of(attention, ATTENTION_FAMILIES), _parts(attention)
    layers: list[torch.nn.Linear] = [getattr(attention, name) for name in parts.qkv]
    attention.qkv_heads = tuple(layer.out_features // attention.head_dim for layer in layers)
    attention.qkv_proj = joined(layers)
    for name in parts.qkv:
        delattr(attention, name)
    source = next(base.__module__ for base in type(attention).__mro__ if base.__name__ == kind)
    mixin = _FORWARDS[ATTENTION_FAMILIES[kind].forwards]
    become(attention, mixin, source=sys.modules[source], window_in=parts.window_in)


Form = Literal["none", "tanh"]
_FAMILIES_WITH_GELU = [family for family in FAMILIES.values() if family.mlp and not family.mlp.gate]
_PLAIN_MLPS = {mlp.kind: (mlp.up, mlp.activation) for family in _FAMILIES_WITH_GELU for mlp in family.mlps}
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


def fuse_gelu(model: PreTrainedModel, technique: str) -> dict[str, int | str]:
    """Replaces the linear layer and the activation of every MLP in place; returns what is recorded of it.

    Raises UnsupportedError, with the model left as it was.
    """
    pairs = []
    for place in modules_of(model, _PLAIN_MLPS):
        mlp = place.layer
        up, act = (
            Place(f"{place.path}.{name}", mlp, name) for name in _PLAIN_MLPS[kind_of(mlp, _PLAIN_MLPS)]
        )
        _require(technique, up, act)
        pairs.append((up, act, _FORMS[type(act.layer).__name__]))
    if not pairs:
        known = ", ".join(family.title for family in _FAMILIES_WITH_GELU)
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


_GATED_FAMILIES = [family for family in FAMILIES.values() if family.mlp and family.mlp.gate]
_GATED_MLPS: dict[str, Mlp] = {mlp.kind: mlp for family in _GATED_FAMILIES for mlp in family.mlps}
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


def fuse_swiglu(model: PreTrainedModel, technique: str) -> dict[str, int | str]:
    """Replaces every gated MLP in place; returns what is recorded of it.

    Raises UnsupportedError, with the model left as it was.
    """
    places = modules_of(model, _GATED_MLPS)
    if not places:
        known = ", ".join(family.title for family in _GATED_FAMILIES)
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
    return _GATED_MLPS[kind_of(mlp, _GATED_MLPS)]
