"""Runs blocks under torch.utils.checkpoint, and chooses what selective checkpointing keeps."""

from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

_aten = torch.ops.aten
DEAR = {
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    _aten._scaled_mm,
    _aten.convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}
"""Matrix products, convolutions and attention: they read much and compute long for each byte of their results."""


def recompute_blocks(model: Module, *, keep_the_dear: bool) -> int:
    """Has each of transformers' blocks compute its activations again in the backward pass; how many there are.

    Dropout is off, so that no random numbers have to be drawn again.
    """
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if keep_the_dear:
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    blocks: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for block in blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, **how)
    return len(blocks)


def _policy(_context: object, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", None)
    return CheckpointPolicy.MUST_SAVE if packet in DEAR else CheckpointPolicy.PREFER_RECOMPUTE
