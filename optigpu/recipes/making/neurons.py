"""Which neurons of each MLP matter least."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from optigpu.recipes.making.learning import AT_ONCE
from optigpu.recipes.making.students import down_layers, inner_size
from optigpu.vocabulary import UnsupportedError

MULTIPLE = 8
"""The number of neurons that stay is a multiple of it: kernels are slower for odd sizes."""


def kept_count(neurons: int, keep: float) -> int:
    """How many of the neurons stay. Raises UnsupportedError if none would, or all."""
    count = round(neurons * keep / MULTIPLE) * MULTIPLE
    if count < MULTIPLE:
        raise UnsupportedError(
            f"An MLP of this model has {neurons} neurons and cannot be pruned to a share of {keep:g}: at least "
            f"{MULTIPLE} must stay; raise keep to {MULTIPLE / neurons:.3g}."
        )
    if count >= neurons:
        raise UnsupportedError(
            f"An MLP of this model has {neurons} neurons, and a share of {keep:g} removes none of them; lower keep to "
            f"{1 - MULTIPLE / neurons:.3g}."
        )
    return count


def kept_neurons(model: PreTrainedModel, texts: torch.Tensor, keep: float) -> list[torch.Tensor]:
    """The neurons of each block that stay, in their order, int64 [neurons].

    A neuron's importance is by how much the loss would change without it, to first order: the sum of |activation times
    gradient|. Source: Molchanov et al., Importance Estimation for Neural Network Pruning, 2019, arXiv:1906.10771.
    """
    count = kept_count(inner_size(model), keep)
    importance = [torch.zeros(inner_size(model), dtype=torch.float64) for _ in down_layers(model)]
    with _watched(model, lambda block, change: importance[block].add_(change)):
        for rows in texts.split(AT_ONCE):
            logits = model(input_ids=rows, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")
            loss.backward()
    return [each.topk(count).indices.sort().values for each in importance]


@contextmanager
def _watched(model: PreTrainedModel, add: Callable[[int, torch.Tensor], object]) -> Iterator[None]:
    """Tells `add` the block and |activation times gradient| of its neurons, [neurons], at each backward pass."""

    def watch(block: int) -> Callable[[Module, tuple[Any, ...]], tuple[Any, ...]]:
        def before(_: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first = inputs[0]  # [rows, length, neurons], or [tokens, neurons]
            activation = first if first.requires_grad else first.detach().requires_grad_(True)

            def changed(gradient: torch.Tensor) -> None:
                change = (activation.detach() * gradient).abs().double()
                add(block, change.flatten(0, -2).sum(dim=0))

            activation.register_hook(changed)
            return (activation, *inputs[1:])

        return before

    handles = [
        layer.register_forward_pre_hook(watch(block)) for block, layer in enumerate(down_layers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
