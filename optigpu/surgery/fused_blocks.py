"""Parts of attentions, MLPs and decoder blocks that are fused: linear layers become one, and so do adding and norming.

In the blocks of known families, adding the residual and norming the sum are one operation.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from optigpu.models.families import Forwards, NormKind, family_of
from optigpu.models.loading.storages import storage_of
from optigpu.ops.activation.fused_activation import activation_backend, activation_reason
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, native_norm_reason, norm_backend
from optigpu.surgery.norm_blocks import TECHNIQUES, checked_blocks
from optigpu.surgery.places import Place, become, linear_of, places_of
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


def fuse_norms(model: PreTrainedModel, kind: NormKind) -> dict[str, int | str]:
    """Joins additions and norms in place; returns what a result says. Raises UnsupportedError if it cannot."""
    decoder, blocks, final = checked_blocks(model, kind)
    forwards = family_of(model.config.model_type).forwards
    backend = norm_backend(model.device)
    if backend == "torch":
        why = "Triton is missing: install it (pip install triton)."
        reason = native_norm_reason() if model.device.type == "cpu" else why
        raise UnsupportedError(f"{TECHNIQUES[kind]} has no kernel here. {reason}")
    norms = [module for module in model.modules() if type(module).__name__ == decoder.norm]
    mixin: type[FusedNorm] = FusedLayerNorm if kind == "LayerNorm" else FusedRmsNorm
    for norm in norms:
        become(norm, mixin).link = Link()
    following: list[FusedNorm | None] = [getattr(block, decoder.first) for block in blocks[1:]]
    following.append(final if isinstance(final, FusedNorm) else None)
    for block, after in zip(blocks, following, strict=True):
        fused = become(block, _BLOCKS[forwards])
        fused.link = Link() if after is None else after.link
        fused.link.norm = after
    additions = 2 * len(blocks) - (following[-1] is None)
    return {"fused_norms": len(norms), "fused_additions": additions, "norm_backend": backend}


class Link:
    """A block's last sum and its norm, which the norm after it uses for that very sum. No module: it has no weights."""

    norm: "FusedNorm | None" = None
    summed: torch.Tensor | None = None
    normed: torch.Tensor | None = None

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x + residual, [batch, length, width]; its norm is kept for the norm that follows."""
        if self.norm is None:
            return x + residual
        self.normed, self.summed = self.norm.add(x, residual)
        return self.summed

    def take(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The norm of `hidden_states` where the block before has computed it, or None."""
        summed, normed = self.summed, self.normed
        self.summed = self.normed = None
        return normed if summed is hidden_states else None


class FusedNorm(torch.nn.Module):
    """Mixed into a norm's class: it takes what the block before has computed. Hidden states: [batch, length, width]."""

    link: Link
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.training:
            plain: torch.Tensor = super().forward(hidden_states)
            return plain
        normed = self.link.take(hidden_states)
        return self.add(hidden_states, None)[0] if normed is None else normed

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        raise NotImplementedError


class FusedLayerNorm(FusedNorm):
    bias: torch.Tensor | None
    eps: float

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class FusedRmsNorm(FusedNorm):
    variance_epsilon: float

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon)


class FusedBlock(torch.nn.Module):
    link: Link


class FusedGpt2Block(FusedBlock):
    """Mixed into transformers' GPT2Block, for blocks without cross-attention."""

    ln_1: FusedNorm
    ln_2: FusedNorm
    attn: torch.nn.Module
    mlp: torch.nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        if self.training or encoder_hidden_states is not None:
            masks = (attention_mask, encoder_hidden_states, encoder_attention_mask)
            return super().forward(hidden_states, past_key_values, *masks, use_cache, **kwargs)
        attended, _ = self.attn(
            self.ln_1(hidden_states),
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        normed, summed = self.ln_2.add(attended, hidden_states)
        return self.link.add(self.mlp(normed), summed)


class FusedOptBlock(FusedBlock):
    """Mixed into transformers' OPTDecoderLayer, for blocks that norm before they attend."""

    self_attn_layer_norm: FusedNorm
    final_layer_norm: FusedNorm
    self_attn: torch.nn.Module
    fc1: torch.nn.Module
    activation_fn: torch.nn.Module
    fc2: torch.nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.training:
            return super().forward(
                hidden_states, attention_mask, past_key_values, use_cache, position_ids, **kwargs
            )
        attended, _ = self.self_attn(
            hidden_states=self.self_attn_layer_norm(hidden_states),
            past_key_values=past_key_values,
            position_ids=position_ids,
            attention_mask=attention_mask,
            **kwargs,
        )
        normed, summed = self.final_layer_norm.add(attended, hidden_states)
        return self.link.add(self.fc2(self.activation_fn(self.fc1(normed))), summed)


class FusedLlamaBlock(FusedBlock):
    """Mixed into transformers' LlamaDecoderLayer, and into what has its structure."""

    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    self_attn: torch.nn.Module
    mlp: torch.nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        named = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "position_embeddings": position_embeddings,
        }
        if self.training:
            return super().forward(hidden_states, **named, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named, **kwargs)
        normed, summed = self.post_attention_layernorm.add(attended, hidden_states)
        return self.link.add(self.mlp(normed), summed)


_BLOCKS: dict[Forwards | None, type[FusedBlock]]
_BLOCKS = {"gpt2": FusedGpt2Block, "opt": FusedOptBlock, "llama": FusedLlamaBlock}
