"""fused_qkv: the matrices of queries, keys and values as one."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.models.facts import ModelFacts
from optigpu.surgery.merging import joined, modules_of, require_mergeable
from optigpu.surgery.places import Place
from optigpu.techniques.base import ON_MODELS, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task, UnsupportedError

_MERGED = ("q_proj", "k_proj", "v_proj")
_ADVICE = "leave fused_qkv out."


class FusedQkv(Technique):
    """Replaces the three projections of each attention by one matrix product, whose output is cut by heads.

    What follows it is transformers' own: the model file's rotary embedding, the cache, the attention function.
    """

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = "queries, keys and values of an attention by one matrix product instead of three"
    citation: ClassVar[str] = "Aminabadi et al., DeepSpeed Inference, 2022, arXiv:2207.00032 (merged QKV)"
    expected: ClassVar[str] = (
        "a few percent of an eager step, more where keys and values are small: two products fewer for each layer; the "
        "bytes of the weights stay the same"
    )

    name: Literal["fused_qkv"] = "fused_qkv"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The attention must be one that it knows, and have three matrices."""
        if model is None or any(family.name == model.family for family in _FAMILIES.values()):
            return None
        return _refusal(model.family)

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """A step that is bound by the weights' bytes gains nothing, and what the calls cost depends on the host."""
        return False

    def modules(self, model: Any, notes: Notes) -> None:
        """Merges every attention in place, one after the other, so that only one layer's matrices are there twice.

        Raises UnsupportedError when there is no attention that it knows, and when the three matrices of one cannot
        become one (see `require_mergeable`).
        """
        places = [place for place in modules_of(model, _FAMILIES) if hasattr(place.layer, "q_proj")]
        if not places:
            raise UnsupportedError(_refusal(model.config.model_type))
        require_mergeable(model, self.name, [_three(place) for place in places])
        for place in places:
            _merge(place.layer)
        notes.record(fused_qkv_layers=len(places))


def _refusal(family: str) -> str:
    if family == "gpt2":
        return f"The attention of gpt2 has one matrix for queries, keys and values already; {_ADVICE}"
    known = ", ".join(sorted(kind.removesuffix("Attention") for kind in _FAMILIES))
    return f"fused_qkv knows the attention of {known}, and not that of {family}; {_ADVICE}"


def _three(place: Place) -> list[Place]:
    return [Place(f"{place.path}.{name}", place.layer, name) for name in _MERGED]


def _merge(attention: Any) -> None:
    """Gives one attention its merged matrix and the forward pass that uses it, and lets the separate ones go.

    It stays an instance of its class, by which transformers finds attentions whose weights a caller asks for.
    """
    layers = [getattr(attention, name) for name in _MERGED]
    attention.qkv_heads = tuple(layer.out_features // attention.head_dim for layer in layers)
    attention.qkv_proj = joined(layers)
    for name in _MERGED:
        delattr(attention, name)
    attention.__class__ = _fused_class(attention.__class__)


@functools.cache
def _fused_class(kind: Any) -> Any:
    base = next(base for base in kind.__mro__ if base.__name__ in _FAMILIES)
    forward = _FAMILIES[base.__name__].forward(sys.modules[base.__module__])
    return type(f"FusedQkv{kind.__name__}", (kind,), {"forward": forward})


def _cut(attention: Any, hidden: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values of `hidden` ([batch, length, width]), each [batch, heads, length, head_dim]."""
    merged = attention.qkv_proj(hidden)
    heads = merged.view(*hidden.shape[:-1], -1, attention.head_dim).transpose(1, 2)
    query, key, value = heads.split(attention.qkv_heads, dim=1)
    return query, key, value


def _attend(
    source: Any, attention: Any, heads: tuple[Any, Any, Any], mask: Any, scaling: float, **more: Any
) -> tuple[Any, Any]:
    """The attention function that the model is set to, as the model's own file calls it.

    Returns [batch, length, heads * head_dim], and the weights where the function keeps them.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, source.eager_attention_forward)
    dropout = attention.dropout if hasattr(attention, "dropout") else attention.attention_dropout
    output, weights = function(
        attention, *heads, mask, dropout=dropout if attention.training else 0.0, scaling=scaling, **more
    )
    return output.reshape(*output.shape[:2], -1).contiguous(), weights


def _rotary_forward(source: Any, window: Callable[[Any], int | None] | None = None) -> Callable[..., Any]:
    """Of Llama and its kin; `window` gives the sliding window that the file passes, where it passes one."""

    def forward(
        self: Any,
        hidden_states: Any,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> tuple[Any, Any]:
        query, key, value = _cut(self, hidden_states)
        query, key = source.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if window is not None:
            more["sliding_window"] = window(self)
        output, weights = _attend(source, self, (query, key, value), attention_mask, self.scaling, **more)
        return self.o_proj(output), weights

    return forward


def _opt_forward(source: Any) -> Callable[..., Any]:
    """OPT scales the queries before anything else, and the attention function by one."""

    def forward(
        self: Any, hidden_states: Any, past_key_values: Any = None, attention_mask: Any = None, **more: Any
    ) -> tuple[Any, Any]:
        query, key, value = _cut(self, hidden_states)
        query = query * self.scaling
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = _attend(source, self, (query, key, value), attention_mask, 1.0, **more)
        return self.out_proj(output), weights

    return forward


def _vit_forward(source: Any) -> Callable[..., Any]:
    """An encoder's: no positions and no cache."""

    def forward(self: Any, hidden_states: Any, attention_mask: Any = None, **more: Any) -> tuple[Any, Any]:
        heads = _cut(self, hidden_states)
        output, weights = _attend(source, self, heads, attention_mask, self.scaling, **more)
        return self.o_proj(output), weights

    return forward


@dataclass(frozen=True)
class _Family:
    """transformers' model_type, and the forward pass of its attention for the file that defines it."""

    name: str
    forward: Callable[[Any], Callable[..., Any]]


def _window_of_mistral(attention: Any) -> int | None:
    return getattr(attention.config, "sliding_window", None)


def _window_of_qwen2(attention: Any) -> int | None:
    window: int | None = attention.sliding_window
    return window


_FAMILIES = {
    "LlamaAttention": _Family("llama", _rotary_forward),
    "MistralAttention": _Family("mistral", functools.partial(_rotary_forward, window=_window_of_mistral)),
    "Qwen2Attention": _Family("qwen2", functools.partial(_rotary_forward, window=_window_of_qwen2)),
    "OPTAttention": _Family("opt", _opt_forward),
    "ViTAttention": _Family("vit", _vit_forward),
}
"""By the name of the class."""
