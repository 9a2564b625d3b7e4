"""The loop of speculative decoding: guess, verify in one pass, keep what is right, take back the rest.

The sequence itself guesses the next tokens, or a smaller model. Greedy verification keeps exactly what greedy decoding
would choose (Leviathan et al., 2022, arXiv:2211.17192, with a temperature of zero). Tokens that were verified together
came at the same moment and share a mark of the clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from optigpu.models.loading.load import count_weights, load_model, loaded_facts
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.speculation import Tally
from optigpu.surgery.extras import other_vocabulary
from optigpu.techniques.base import Loop, Notes
from optigpu.vocabulary import ReplicateError, UnsupportedError

SAFETY = 4
"""In a tie, two logits may differ by this many times the rounding between the plain model's two ways to compute
them."""


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


class DraftModel:
    """Greedy decoding by a smaller model with its own cache, which is cropped to what was right."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._context = loaded_facts(model).longest
        self.begin()

    def begin(self) -> None:
        """Empties the cache: nothing is kept from one request to the next, even where their prompts are equal."""
        self._cache = DynamicCache(config=self._model.config)
        self._cached: list[int] = []

    def guess(self, sequence: list[int], limit: int) -> list[int]:
        """One pass over what it has not seen yet, then one for each further guess; the device is waited for once."""
        limit = min(limit, self._context - len(sequence))
        if limit < 1:
            return []
        # Takes back the guesses that were wrong; the last token of the sequence is always run.
        pairs = enumerate(zip(self._cached, sequence[:-1], strict=False))
        most = min(len(self._cached), len(sequence) - 1)
        known = next((index for index, (mine, right) in pairs if mine != right), most)
        if known < len(self._cached):
            self._cache.crop(known - len(self._cached))
        self._cached = self._cached[:known]
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


@dataclass(eq=False)
class SpeculativeLoop:
    """A Loop that decodes one sequence, and has `score`."""

    plain: Loop
    model: PreTrainedModel
    draft: PromptLookup | DraftModel
    lookahead: int
    notes: Notes
    _tally: Tally = field(default_factory=Tally)
    _compared: bool = False

    def __call__(self, prompt: torch.Tensor, new_tokens: int, clock: Any) -> tuple[torch.Tensor, list[Any]]:
        """Greedy tokens int64 [1, new_tokens] and new_tokens + 1 marks. `prompt`: int64 [1, prompt_tokens].

        Raises UnsupportedError for a batch, and ReplicateError when the first request's tokens are not those of greedy
        decoding and rounding does not explain it.
        """
        if prompt.shape[0] != 1:
            raise UnsupportedError(
                f"speculative_decoding needs a batch size of 1, not {prompt.shape[0]}; set batch_size to 1."
            )
        decoded, marks = self._decode(prompt, new_tokens, clock)
        tokens = torch.tensor([decoded], device=prompt.device)
        self.notes.record(**self._tally.facts())
        if not self._compared:
            expected, _ = self.plain(prompt, new_tokens, clock)
            self.notes.record(**self._comparison(prompt, tokens, expected))
            self._compared = True
        return tokens, marks

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        By the passes that verify, as long as they can be: what is scored is what would have been guessed.
        """
        cache = self._new_cache()
        if prefill:
            self._pass(tokens[:, :prefill], cache, keep=1)
        most = self.lookahead + 1
        for start in range(prefill, tokens.shape[1], most):
            logits = self._pass(tokens[:, start : start + most], cache, keep=0)
            for index in range(logits.shape[1]):
                yield logits[:, index].detach().float()

    def _decode(self, prompt: torch.Tensor, new_tokens: int, clock: Any) -> tuple[list[int], list[Any]]:
        marks = [clock.mark()]
        self.draft.begin()
        cache = self._new_cache()
        first = self._pass(prompt, cache, keep=1)[:, -1].argmax(dim=-1)
        sequence: list[int] = [*prompt[0].tolist(), int(first)]
        marks.append(clock.mark())
        length = prompt.shape[1] + new_tokens
        while len(sequence) < length:
            guesses = self.draft.guess(sequence, min(self.lookahead, length - len(sequence) - 1))
            given = torch.tensor([[sequence[-1], *guesses]], device=prompt.device)
            chosen: list[int] = self._pass(given, cache, keep=0)[0].argmax(dim=-1).tolist()
            pairs = enumerate(zip(guesses, chosen, strict=False))
            right = next((index for index, (guess, choice) in pairs if guess != choice), len(guesses))
            if right < len(guesses):
                cache.crop(right - len(guesses))
            sequence += chosen[: right + 1]
            marks += [clock.mark()] * (right + 1)
            self._tally.passes += 1
            self._tally.tokens += right + 1
            self._tally.guessed += len(guesses)
            self._tally.accepted += right
        return sequence[prompt.shape[1] :], marks

    def _comparison(
        self, prompt: torch.Tensor, tokens: torch.Tensor, expected: torch.Tensor
    ) -> dict[str, float]:
        """The share of tokens up to the first that plain greedy decoding chooses otherwise; after a tie texts part."""
        differing = (tokens != expected)[0].nonzero()
        if not len(differing):
            return {"speculation_agreement": 1.0}
        first = int(differing[0])
        context = torch.cat([prompt, expected[:, :first]], dim=1)
        whole = self.model(input_ids=context, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        apart = abs(float(whole[tokens[0, first]] - whole[expected[0, first]]))
        # How far apart the plain model's logits are when it gets there at once and token by token.
        cache = self._new_cache()
        stepwise = self._pass(context[:, :1], cache, keep=1)
        for token in context[:, 1:].split(1, dim=1):
            stepwise = self._pass(token, cache, keep=1)
        unit = torch.finfo(self.model.dtype).eps * float(whole.abs().max())
        rounding = max(unit, float((stepwise[0, -1].float() - whole).abs().max()))
        if apart > SAFETY * rounding:
            raise ReplicateError(
                f"speculative_decoding chose token {int(tokens[0, first])} where greedy decoding chooses "
                f"{int(expected[0, first])}; their logits differ by {apart:.3g}, and rounding explains only "
                f"{SAFETY * rounding:.3g}."
            )
        return {"speculation_agreement": first / tokens.shape[1], "speculation_tie": apart}

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def _pass(self, tokens: torch.Tensor, cache: Cache, keep: int) -> torch.Tensor:
        """Logits after the last `keep` of the tokens, 0 for all; the cache takes them all in."""
        output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        logits: torch.Tensor = output.logits
        return logits
