"""Attentions with one matrix for queries, keys and values, and forward passes that use it.

What follows the matrix is transformers' own: the model file's rotary embedding, the cache, the attention function.
"""

import sys
from types import ModuleType
from typing import Any, Literal

import torch
from transformers import Cache, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from optigpu.models.families import FAMILIES, AttentionParts, Forwards, ModelFamily
from optigpu.surgery.fused_blocks import joined, kind_of, modules_of, require_mergeable
from optigpu.surgery.places import Place, become

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ATTENTION_FAMILIES: dict[str, ModelFamily] = {
    family.attention.kind: family
    for family in FAMILIES.values()
    if family.attention and len(family.attention.qkv) == 3
}
"""By transformers' class of the attention."""


def merge(model: torch.nn.Module, technique: str) -> int:
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
        _merge(place.layer)
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


def _merge(attention: Any) -> None:
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
