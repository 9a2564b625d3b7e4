"""Who guesses the next tokens for speculative decoding: the sequence itself, or a smaller model."""

from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from optigpu.models.loading.load import count_weights, load_model, loaded_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.speculative_decoding import other_vocabulary
from optigpu.vocabulary import UnsupportedError


class Draft(Protocol):
    """One way to guess."""

    def begin(self) -> None:
        """Forgets the sequence before: another request begins."""

    def guess(self, sequence: list[int], limit: int) -> list[int]:
        """Up to `limit` ids that may follow `sequence`; empty if there is no guess."""


class PromptLookup:
    """Guesses the tokens that followed the last ones at their previous occurrence, the longest match first.

    Source: Saxena, Prompt Lookup Decoding, 2023, which takes the first place where they were seen and not the last.
    """

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram

    def begin(self) -> None:
        """Nothing is kept between calls."""

    def guess(self, sequence: list[int], limit: int) -> list[int]:
        """Searches backwards from the end."""
        for size in range(min(self._ngram, len(sequence) - 1), 0, -1):
            pattern = sequence[-size:]
            for start in range(len(sequence) - size - 1, -1, -1):
                if sequence[start : start + size] == pattern:
                    return sequence[start + size : start + size + limit]
        return []


def draft_of(drafting: PreTrainedModel | None, ngram: int) -> Draft:
    """Guesses by a draft model, or from the sequence where there is none."""
    return PromptLookup(ngram) if drafting is None else DraftModel(drafting, loaded_facts(drafting).longest)


class DraftModel:
    """Greedy decoding by a smaller model with its own cache, which is cropped to what was right."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        """`context` is the most tokens that the model can take."""
        self._model = model
        self._context = context
        self._cache = DynamicCache(config=model.config)
        self._cached: list[int] = []

    def begin(self) -> None:
        """Empties the cache: nothing is kept from one request to the next, even where their prompts are equal."""
        self._cache = DynamicCache(config=self._model.config)
        self._cached = []

    def guess(self, sequence: list[int], limit: int) -> list[int]:
        """One pass over what it has not seen yet, then one for each further guess; the device is waited for once."""
        limit = min(limit, self._context - len(sequence))
        if limit < 1:
            return []
        self._crop_to(sequence)
        token = torch.tensor([sequence[len(self._cached) :]], device=self._model.device)
        guesses = []
        for _ in range(limit):
            logits = self._model(
                input_ids=token, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            ).logits
            token = logits.argmax(dim=-1)
            guesses.append(token)
        made: list[int] = torch.cat(guesses, dim=1)[0].tolist()
        self._cached = sequence + made[:-1]
        return made

    def _crop_to(self, sequence: list[int]) -> None:
        """Takes back the guesses that were wrong; the last token of the sequence is always run."""
        known = 0
        for mine, right in zip(self._cached, sequence[:-1], strict=False):
            if mine != right:
                break
            known += 1
        wrong = len(self._cached) - known
        if wrong:
            self._cache.crop(-wrong)
        self._cached = self._cached[:known]


def load_draft(draft: str, model: PreTrainedModel, notes: Notes) -> PreTrainedModel:
    """The draft model, on the device and in the dtype of the model.

    Raises UnsupportedError when it cannot be loaded or has another vocabulary.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    drafting = load_model(parse_reference(draft), device=str(model.device), dtype=dtype)
    facts = loaded_facts(drafting)
    problem = other_vocabulary(draft, facts.vocabulary, model.config.get_text_config(decoder=True).vocab_size)
    if problem:
        raise UnsupportedError(problem)
    notes.record(draft_weights=count_weights(drafting))
    return drafting
