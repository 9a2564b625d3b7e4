"""Layers of which a model reads more than what they compute, such as a weight that it multiplies with by itself."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn import Module
from transformers import GenerationConfig, PreTrainedModel

from optigpu.models.facts import image_facts_from_config
from optigpu.models.loading.self_written import forked_random

TOKENS, NEW_TOKENS = 2, 2


class _Watched(Module):
    """In the place of a module: it computes the same, and notes that the model asked for anything else."""

    def __init__(self, watched: Module) -> None:
        super().__init__()
        self.watched = watched
        self.was_read = False

    def forward(self, *given: object, **named: object) -> object:
        return self.watched(*given, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("watched"), name)
            self.was_read = True
            return found


def read_layers(model: Module, layers: Collection[Module]) -> set[Module]:
    """Those of the layers whose attributes the model reads, so that no other layer can stand for them.

    Runs the model on a short text or an image, and leaves it and torch's random state as they were. Empty for a model
    that is not transformers', or that takes something else (sound).
    """
    if not isinstance(model, PreTrainedModel):
        return set()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with (
            _watched(model, set(layers)) as watched,
            torch.no_grad(),
            forked_random(model.device),
            suppress(Exception),  # of the model's own code, given what it may not take
        ):
            _run(model)
    finally:
        for module, training in modes:
            module.training = training
    return {each.watched for each in watched if each.was_read}


@contextmanager
def _watched(model: Module, layers: set[Module]) -> Iterator[list[_Watched]]:
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if child in layers
    ]
    watched = {child: _Watched(child) for _, _, child in places}
    for parent, name, child in places:
        parent._modules[name] = watched[child]
    try:
        yield list(watched.values())
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _run(model: PreTrainedModel) -> None:
    """A pass over a prompt and a step, or one over an image."""
    if model.can_generate():
        ids = torch.arange(1, TOKENS + 1, device=model.device)[None]
        generate: Any = model.generate
        asked = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)
        return
    facts = image_facts_from_config(model.config.model_type, model.config.to_dict() | {"num_labels": 1})
    side = facts.image_size
    model(pixel_values=torch.zeros(1, facts.channels, side, side, dtype=model.dtype, device=model.device))
