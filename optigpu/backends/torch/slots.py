"""Sequences that join and leave between decode steps, by the model's own modules over a cache in blocks."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from optigpu.backends.serving import Slots
from optigpu.backends.torch.modes import Mode
from optigpu.backends.torch.paged_cache import BlockTable, PagedLayer
from optigpu.vocabulary import UnsupportedError

ATTENTIONS = ("sdpa", "eager")
"""transformers' attentions that take any mask."""


@runtime_checkable
class ServingLoop(Protocol):
    """A technique's decode loop that also serves."""

    def slots(self, count: int, length: int, block_tokens: int) -> Slots:
        """Free places, as ServingRuntime.slots has them; the caller has not entered the stack's mode."""


class TorchSlots:
    """Slots of a transformers model."""

    def __init__(
        self, model: PreTrainedModel, mode: Mode, count: int, length: int, block_tokens: int
    ) -> None:
        """Raises UnsupportedError for a model whose layers do not all attend to the whole sequence."""
        require_pageable(model)
        self.count, self.length, self.block_tokens = count, length, block_tokens
        self._model, self._mode = model, mode
        self._table = BlockTable(count, length, block_tokens, model.device)
        layers = len(DynamicCache(config=model.config).layers)
        self._cache: Cache = Cache(layers=[PagedLayer(self._table) for _ in range(layers)])
        self._last = [0] * count

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        """One pass over the prompt by itself."""
        self._table.place(slot, len(prompt))
        with self._mode():
            logits = self._model(
                input_ids=torch.tensor([list(prompt)], device=self._model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            self._last[slot] = int(logits[0, -1].argmax())
        return self._last[slot]

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        """One pass over one token of each sequence, padded to the longest."""
        positions = [[self._table.lengths[slot]] for slot in slots]
        device = self._model.device
        with self._mode():
            mask = self._mask(self._table.place_all(slots))
            logits = self._model(
                input_ids=torch.tensor([[self._last[slot]] for slot in slots], device=device),
                position_ids=torch.tensor(positions, device=device),
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            tokens: list[int] = logits[:, -1].argmax(dim=-1).tolist()
        for slot, token in zip(slots, tokens, strict=True):
            self._last[slot] = token
        return tokens

    def leave(self, slot: int) -> None:
        """Its blocks may be taken by the next."""
        self._table.give_back(slot)

    def emptied(self, count: int, length: int, block_tokens: int) -> bool:
        """Ends all sequences and keeps the memory, if these are such places; else False."""
        if (self.count, self.length, self.block_tokens) != (
            count,
            length,
            block_tokens,
        ) or not self._cache.layers:
            return False
        for slot in range(count):
            self._table.give_back(slot)
        return True

    def close(self) -> None:
        """Drops the pools."""
        self._cache.layers = []

    def _mask(self, attended: torch.Tensor) -> torch.Tensor:
        """[batch, 1, 1, tokens], in the form that the model's attention takes: booleans, or what is added to scores."""
        wanted = attended[:, None, None, :]
        if self._model.config._attn_implementation == "sdpa":
            return wanted
        dtype = self._model.dtype
        return torch.zeros(wanted.shape, dtype=dtype, device=wanted.device).masked_fill(
            ~wanted, torch.finfo(dtype).min
        )


def require_pageable(model: PreTrainedModel) -> None:
    """Raises UnsupportedError for layers that a cache in blocks cannot hold, or an attention that takes no mask."""
    others = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {
        DynamicLayer.__name__
    }
    if others:
        raise UnsupportedError(
            "serve needs layers that attend to the whole sequence; this model also has "
            f"{', '.join(sorted(others))}. Measure generate, or another model."
        )
    attention = model.config._attn_implementation
    if attention not in ATTENTIONS:
        raise UnsupportedError(
            f"serve needs an attention that takes a mask ({' or '.join(ATTENTIONS)}), and this stack has {attention}; "
            "leave that technique out."
        )
