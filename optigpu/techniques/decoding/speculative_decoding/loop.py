"""The loop of speculative decoding: guess, verify in one pass, keep what is right, take back the rest.

Greedy verification keeps exactly what greedy decoding would choose (Leviathan et al., 2022, arXiv:2211.17192, with a
temperature of zero). Tokens that were verified together came at the same moment and share a mark of the clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from optigpu.techniques.base import Loop, Notes
from optigpu.techniques.decoding.speculative_decoding.drafts import Draft
from optigpu.vocabulary import ReplicateError, UnsupportedError

SAFETY = 4
"""In a tie, two logits may differ by this many times the rounding between the plain model's two ways to compute
them."""


@dataclass
class Tally:
    """Counts over all requests so far; the first token of each comes with its prompt."""

    passes: int = 0
    tokens: int = 0
    guessed: int = 0
    accepted: int = 0

    def facts(self) -> dict[str, float | None]:
        """For a result's details."""
        return {
            "acceptance_rate": self.accepted / self.guessed if self.guessed else None,
            "tokens_per_pass": self.tokens / self.passes if self.passes else None,
        }


class SpeculativeLoop:
    """A Loop that decodes one sequence, and has `score`."""

    def __init__(
        self, plain: Loop, model: PreTrainedModel, draft: Draft, lookahead: int, notes: Notes
    ) -> None:
        self._plain = plain
        self._model = model
        self._draft = draft
        self._lookahead = lookahead
        self._notes = notes
        self._tally = Tally()
        self._compared = False

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
        self._notes.record(**self._tally.facts())
        if not self._compared:
            expected, _ = self._plain(prompt, new_tokens, clock)
            self._notes.record(**self._comparison(prompt, tokens, expected))
            self._compared = True
        return tokens, marks

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        By the passes that verify, as long as they can be: what is scored is what would have been guessed.
        """
        cache = self._new_cache()
        if prefill:
            self._pass(tokens[:, :prefill], cache, keep=1)
        most = self._lookahead + 1
        for start in range(prefill, tokens.shape[1], most):
            logits = self._pass(tokens[:, start : start + most], cache, keep=0)
            for index in range(logits.shape[1]):
                yield logits[:, index].detach().float()

    def _decode(self, prompt: torch.Tensor, new_tokens: int, clock: Any) -> tuple[list[int], list[Any]]:
        marks = [clock.mark()]
        self._draft.begin()
        cache = self._new_cache()
        first = self._pass(prompt, cache, keep=1)[:, -1].argmax(dim=-1)
        sequence: list[int] = [*prompt[0].tolist(), int(first)]
        marks.append(clock.mark())
        length = prompt.shape[1] + new_tokens
        while len(sequence) < length:
            guesses = self._draft.guess(sequence, min(self._lookahead, length - len(sequence) - 1))
            given = torch.tensor([[sequence[-1], *guesses]], device=prompt.device)
            chosen: list[int] = self._pass(given, cache, keep=0)[0].argmax(dim=-1).tolist()
            right = _agreeing(guesses, chosen)
            if right < len(guesses):
                cache.crop(right - len(guesses))
            sequence += chosen[: right + 1]
            marks += [clock.mark()] * (right + 1)
            self._count(len(guesses), right)
        return sequence[prompt.shape[1] :], marks

    def _count(self, guessed: int, right: int) -> None:
        self._tally.passes += 1
        self._tally.tokens += right + 1
        self._tally.guessed += guessed
        self._tally.accepted += right

    def _comparison(
        self, prompt: torch.Tensor, tokens: torch.Tensor, expected: torch.Tensor
    ) -> dict[str, float]:
        """The share of tokens up to the first that plain greedy decoding chooses otherwise; after a tie texts part."""
        differing = (tokens != expected)[0].nonzero()
        if not len(differing):
            return {"speculation_agreement": 1.0}
        first = int(differing[0])
        context = torch.cat([prompt, expected[:, :first]], dim=1)
        whole = self._model(input_ids=context, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        apart = abs(float(whole[tokens[0, first]] - whole[expected[0, first]]))
        rounding = self._rounding(context, whole)
        if apart > SAFETY * rounding:
            raise ReplicateError(
                f"speculative_decoding chose token {int(tokens[0, first])} where greedy decoding chooses "
                f"{int(expected[0, first])}; their logits differ by {apart:.3g}, and rounding explains only "
                f"{SAFETY * rounding:.3g}."
            )
        return {"speculation_agreement": first / tokens.shape[1], "speculation_tie": apart}

    def _rounding(self, context: torch.Tensor, whole: torch.Tensor) -> float:
        """How far apart the plain model's logits are when it gets there at once and token by token."""
        cache = self._new_cache()
        stepwise = self._pass(context[:, :1], cache, keep=1)
        for token in context[:, 1:].split(1, dim=1):
            stepwise = self._pass(token, cache, keep=1)
        unit = torch.finfo(self._model.dtype).eps * float(whole.abs().max())
        return max(unit, float((stepwise[0, -1].float() - whole).abs().max()))

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _pass(self, tokens: torch.Tensor, cache: Cache, keep: int) -> torch.Tensor:
        """Logits after the last `keep` of the tokens, 0 for all; the cache takes them all in."""
        output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        logits: torch.Tensor = output.logits
        return logits


def _agreeing(guesses: list[int], chosen: list[int]) -> int:
    """How many guesses from the first on are what the model chooses; `chosen` has one more."""
    for index, (guess, choice) in enumerate(zip(guesses, chosen, strict=False)):
        if guess != choice:
            return index
    return len(guesses)
