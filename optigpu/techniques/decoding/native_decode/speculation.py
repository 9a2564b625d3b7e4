"""The loop that verifies guesses by the operator, several tokens in a pass."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from optigpu.ops.decode.cpu.decoder import CpuDecoder, Part
from optigpu.ops.decode.cpu.speculation import GuessingDecoder
from optigpu.techniques.base import Loop, Notes
from optigpu.vocabulary import ReplicateError, UnsupportedError


class Clock(Protocol):
    """Marks moments."""

    def mark(self) -> object:
        """This moment."""


class NativeSpeculation:
    """A Loop that decodes one sequence, and has `score`. Tokens that were verified together share a mark."""

    def __init__(
        self,
        plain: Loop,
        decoder: CpuDecoder,
        guessing: GuessingDecoder,
        lookahead: int,
        tokens_at_once: int,
        facts: Mapping[str, object],
        notes: Notes,
    ) -> None:
        self._plain = plain
        self._decoder = decoder
        self._guessing = guessing
        self._lookahead = lookahead
        self._tokens_at_once = tokens_at_once
        self._facts = facts
        self._notes = notes
        self._compared = False

    def __call__(
        self, prompt: torch.Tensor, new_tokens: int, clock: Clock
    ) -> tuple[torch.Tensor, list[object]]:
        """Greedy tokens int64 [1, new_tokens] and new_tokens + 1 marks. `prompt`: int64 [1, prompt_tokens].

        Raises UnsupportedError for a batch, and ReplicateError when the first request's tokens are not those of plain
        decoding, which they are bit by bit.
        """
        if prompt.shape[0] != 1:
            raise UnsupportedError(
                f"speculative_decoding needs a batch size of 1, not {prompt.shape[0]}; set batch_size to 1."
            )
        marks = [clock.mark()]
        first = self._guessing.begin(prompt, new_tokens).argmax(dim=1, keepdim=True)
        marks.append(clock.mark())
        others = first.new_empty(1, new_tokens - 1)
        calls = self._guessing.decode_into(others, self._tokens_at_once) if new_tokens > 1 else ()
        for chosen in calls:
            marks += [clock.mark()] * chosen
        tokens = torch.cat([first, others], dim=1)
        self._record()
        if not self._compared:
            self._compare(tokens, self._plain(prompt, new_tokens, clock)[0])
        return tokens, marks

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        By passes that are as long as those that verify can be: what is scored is what would have been guessed.
        """
        self._notes.record(**self._facts)
        batch, length = tokens.shape
        self._decoder.begin(batch, length)
        if prefill:
            self._decoder.extend(tokens[:, :prefill])
        for start in range(prefill, length, self._lookahead + 1):
            given = tokens[:, start : start + self._lookahead + 1].tolist()
            count = len(given[0])
            self._decoder.advance([Part(row, start, part, count) for row, part in enumerate(given)])
            yield from self._decoder.logits.clone().view(batch, count, -1).unbind(1)

    def _record(self) -> None:
        tally = self._guessing.tally
        self._notes.record(
            **self._facts,
            acceptance_rate=tally.accepted / tally.guessed if tally.guessed else None,
            tokens_per_pass=tally.tokens / tally.passes if tally.passes else None,
        )

    def _compare(self, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        differing = (tokens != expected)[0].nonzero()
        if len(differing):
            raise ReplicateError(
                f"native_decode with guesses chose another token than without at {int(differing[0])}; leave "
                "speculative_decoding out, and report this with the model."
            )
        self._notes.record(speculation_agreement=1.0)
        self._compared = True
