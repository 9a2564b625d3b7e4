"""Decoder blocks of known families in which adding the residual and norming the sum are one operation.

A block of a pre-norm decoder adds its attention's and its MLP's output to the residual, and each sum is normed at once:
by its own second norm, and by the first norm of the block after it (the final norm after the last block). Here blocks
and norms keep their modules, names and weights; they become instances of subclasses whose `forward` joins the two.
What a block returns is the sum, as ever, so that caches, masks, hooks and the recording of hidden states see no
difference. In training, blocks and norms compute as they did: the joined operations have no gradient.

Works inside the measuring process alone, on a loaded model.
"""

import functools
from collections.abc import Callable
from typing import Any

from optigpu.surgery.norm_families import NormKind, checked_blocks, require_kernel


def fuse_norms(model: Any, kind: NormKind) -> dict[str, Any]:
    """Joins each residual addition and the norm after it, in place; returns what a result says of it.

    `fused_norms` counts every norm of the family's class that is ours now, `fused_additions` the residual additions
    that are gone. Raises UnsupportedError, with the model left as it was, for a model whose blocks are not known, have
    norms of the other kind or are not those of transformers any more, and where norms are plain torch.
    """
    from optigpu.ops.norm.fused_norm import norm_backend

    family, blocks, final = checked_blocks(model, kind)
    backend = norm_backend(model.device)
    require_kernel(kind, model.device, backend)
    norms = [module for module in model.modules() if type(module).__name__ == family.norm]
    for norm in norms:
        _become(norm, _norm_class)
        norm.link = Link()
    following = [getattr(block, family.first) for block in blocks[1:]] + [final]
    for block, norm in zip(blocks, following, strict=True):
        _become(block, _block_class)
        block.link = Link() if norm is None else norm.link
        block.link.norm = norm
    additions = 2 * len(blocks) - (final is None)
    return {"fused_norms": len(norms), "fused_additions": additions, "norm_backend": backend}


class Link:
    """What joins a block to the norm after it: the sum that it returned last, and the norm of that sum.

    The norm may use it for that very sum alone. A plain object, so that no module has another one's weights.
    """

    norm: Any = None
    summed: Any = None
    normed: Any = None

    def add(self, x: Any, residual: Any) -> Any:
        """x + residual, [batch, length, width]; its norm is kept for the norm that follows."""
        if self.norm is None:
            return x + residual
        self.normed, self.summed = self.norm.add(x, residual)
        return self.summed

    def take(self, hidden_states: Any) -> Any:
        """The norm of `hidden_states` where the block before has computed it, or None."""
        summed, normed = self.summed, self.normed
        self.summed = self.normed = None
        return normed if summed is hidden_states else None


def _become(module: Any, subclass_of: Callable[[Any], Any]) -> None:
    kind: Any = type(module)
    module.__class__ = subclass_of(kind)


@functools.cache
def _norm_class(base: Any) -> Any:
    """A subclass of a norm's class that takes what the block before has computed."""
    import torch

    from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm

    class FusedNorm(base):  # type: ignore[misc]
        """The norm of hidden states [batch, length, width]."""

        link: Link

        def forward(self, hidden_states: Any) -> Any:
            if self.training:
                return super().forward(hidden_states)
            normed = self.link.take(hidden_states)
            return self.add(hidden_states, None)[0] if normed is None else normed

        def add(self, x: Any, residual: Any) -> Any:
            """(norm of x + residual, x + residual)."""
            if is_layer_norm:
                return add_layer_norm(x, residual, self.weight, self.bias, self.eps)
            return add_rms_norm(x, residual, self.weight, self.variance_epsilon)

    is_layer_norm = issubclass(base, torch.nn.LayerNorm)
    return FusedNorm


@functools.cache
def _block_class(base: Any) -> Any:
    """A subclass of a block's class that hands its sums to the norms."""
    return {"GPT2Block": _gpt2_block, "OPTDecoderLayer": _opt_block}.get(base.__name__, _llama_block)(base)


def _gpt2_block(base: Any) -> Any:
    class FusedBlock(base):  # type: ignore[misc]
        """transformers' GPT2Block without cross-attention."""

        link: Link

        def forward(
            self,
            hidden_states: Any,
            past_key_values: Any = None,
            attention_mask: Any = None,
            encoder_hidden_states: Any = None,
            encoder_attention_mask: Any = None,
            use_cache: bool | None = False,
            **kwargs: Any,
        ) -> Any:
            if self.training or encoder_hidden_states is not None:
                return super().forward(
                    hidden_states,
                    past_key_values,
                    attention_mask,
                    encoder_hidden_states,
                    encoder_attention_mask,
                    use_cache,
                    **kwargs,
                )
            attended, _ = self.attn(
                self.ln_1(hidden_states),
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                use_cache=use_cache,
                **kwargs,
            )
            normed, summed = self.ln_2.add(attended, hidden_states)
            return self.link.add(self.mlp(normed), summed)

    return FusedBlock


def _opt_block(base: Any) -> Any:
    class FusedBlock(base):  # type: ignore[misc]
        """transformers' OPTDecoderLayer that norms before it attends."""

        link: Link

        def forward(
            self,
            hidden_states: Any,
            attention_mask: Any = None,
            past_key_values: Any = None,
            use_cache: bool | None = False,
            position_ids: Any = None,
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

    return FusedBlock


def _llama_block(base: Any) -> Any:
    class FusedBlock(base):  # type: ignore[misc]
        """transformers' LlamaDecoderLayer, and what has its structure."""

        link: Link

        def forward(
            self,
            hidden_states: Any,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            use_cache: bool | None = False,
            position_embeddings: Any = None,
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

    return FusedBlock
