"""Runs blocks under torch.utils.checkpoint, and chooses what selective checkpointing keeps."""

import math
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Matrix products, and which argument is the first of the two matrices."""
_DEARER = {
    _aten._scaled_mm,
    _aten.convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}
"""What is always kept."""
AGAIN = 1 / 9
"""The most of the operations of a block's products that selective checkpointing computes again."""

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def recompute_blocks(model: Module, *, keep_the_dear: bool) -> int:
    """Has each of transformers' blocks compute its activations again in the backward pass; how many there are.

    Dropout is off, so that no random numbers have to be drawn again.
    """
    plain = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    blocks: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for block in blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = (
            partial(plain, context_fn=KeptProducts().contexts) if keep_the_dear else plain
        )
    return len(blocks)


class KeptProducts:
    """Which results of a block's matrix products and attention are kept, chosen after its first pass.

    A byte of any product's result takes about as many operations. So the smallest products are computed again, up to
    AGAIN of all; and the last one of a block is not kept, since what comes after it is a sum, which needs no operand in
    the backward pass: torch stops to compute a block again when it has everything.
    """

    def __init__(self) -> None:
        self._operations: list[float] = []
        self._again: frozenset[int] | None = None

    def contexts(self) -> Contexts:
        """Those of one pass and of its recomputation. The first pass keeps all, and counts."""
        if self._again is None and self._operations:
            self._again = chosen_again(self._operations)
        seen: Counter[bool] = Counter()
        again = self._again

        def policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
            packet = getattr(operator, "overloadpacket", None)
            if packet not in _PRODUCTS and packet not in _DEARER:
                return CheckpointPolicy.PREFER_RECOMPUTE
            index = seen[context.is_recompute]
            seen[context.is_recompute] += 1
            if again is None and not context.is_recompute:
                first = _PRODUCTS.get(packet)  # None: always kept
                count = None if first is None else arguments[first].numel() * arguments[first + 1].shape[-1]
                self._operations.append(math.inf if count is None else float(count))
            is_again = again is not None and index in again
            return CheckpointPolicy.PREFER_RECOMPUTE if is_again else CheckpointPolicy.MUST_SAVE

        contexts: Contexts = create_selective_checkpoint_contexts(policy)
        return contexts


def chosen_again(operations: list[float]) -> frozenset[int]:
    """The indices of the results that are not kept; `operations` are those of a block in its order, infinite: keep."""
    needed = range(len(operations) - 1)
    left = AGAIN * sum(operations[index] for index in needed if math.isfinite(operations[index]))
    chosen = {len(operations) - 1}
    for index in sorted(needed, key=lambda index: operations[index]):
        if operations[index] <= left:
            left -= operations[index]
            chosen.add(index)
    return frozenset(chosen)
