"""Decoder blocks of known families in which adding the residual and norming the sum are one operation.

Each sum of a pre-norm block is normed at once: by its own second norm, and by the first norm of the block after it.
Blocks and norms keep their modules, names and weights; they become instances of subclasses whose `forward` joins the
two. A block returns the sum as ever. In training all compute as they did: the joined operations have no gradient.
"""

from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from optigpu.models.families import Forwards, NormKind, family_of
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, native_norm_reason, norm_backend
from optigpu.surgery.norm_blocks import TECHNIQUES, checked_blocks
from optigpu.surgery.places import become
from optigpu.vocabulary import UnsupportedError


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
