"""What inputs a decoder's layers get, from text that the model wrote itself: their second moments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from optigpu.models.loading.self_written import sampled
from optigpu.surgery.places import Place, weight_of

Moments = dict[str, torch.Tensor]
Inputs = tuple[torch.Tensor, ...]

ROWS, LENGTH = 64, 128
"""Sequences and tokens of the text. A quarter of it gave bundled:tiny an eighth more divergence, and four times as much
no less."""
SEED = 1
"""A different text from those of sensitivity and quality."""
MOMENTS_MEMORY_SHARE = 1.25
"""The share of the weights' memory that the moments of one pass may take; a single layer's may take more."""


def moments_by_layer(
    model: PreTrainedModel, places: Sequence[Place]
) -> Iterator[tuple[list[Place], Moments]]:
    """Some layers at a time with the sums of x xT over all tokens, float32 [inputs, inputs], by their paths.

    Layers that get the same inputs share one. A pass over the text is made for each part of the model, so that the
    caller may exchange layers in between: later ones are then calibrated on what those give.
    """
    if not places:
        return
    length = min(LENGTH, model.config.max_position_embeddings)
    tokens = sampled(model, model.config.vocab_size, ROWS, length, SEED, at_once=ROWS)
    most = int(MOMENTS_MEMORY_SHARE * sum(weight_of(place.layer).nbytes for place in places))
    for part in _parts(places, most):
        yield part, _moments(model, part, tokens)


def _parts(places: Sequence[Place], most: int) -> Iterator[list[Place]]:
    part: list[Place] = []
    size = 0
    for place in places:
        needed = 4 * weight_of(place.layer).shape[1] ** 2
        if part and size + needed > most:
            yield part
            part, size = [], 0
        part.append(place)
        size += needed
    if part:
        yield part


def _moments(model: PreTrainedModel, places: Sequence[Place], tokens: torch.Tensor) -> Moments:
    found: Moments = {}
    with torch.no_grad(), _watched(places, found):
        model(input_ids=tokens, use_cache=False)
    return found


@contextmanager
def _watched(places: Sequence[Place], found: Moments) -> Iterator[None]:
    """Gathers while one pass runs. Queries, keys and values come one after the other and get the same tensor."""
    last: tuple[torch.Tensor, torch.Tensor] | None = None

    def watch(path: str) -> Callable[[torch.nn.Module, Inputs], None]:
        def before(_: torch.nn.Module, inputs: Inputs) -> None:
            nonlocal last
            if last is None or inputs[0] is not last[0]:
                x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()
                last = inputs[0], x.T @ x
            found[path] = last[1]

        return before

    handles = [place.layer.register_forward_pre_hook(watch(place.path)) for place in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
