"""What a load asks of an engine: sequences that join and leave between decode steps, or a server's streams.

An engine that answers a batch's sequences one by one counts their tokens as they come.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from optigpu.backends.runtime import DecodingRuntime, EncodingRuntime, Generation
from optigpu.quality.told import Telling
from optigpu.vocabulary import OptiGPUError


class Slots(Protocol):
    """Places for `count` sequences of at most `length` tokens each, prompt included, that decode together.

    The keys and values of a sequence lie in blocks of `block_tokens` tokens, which it takes as it grows and gives back
    when it leaves. Each call returns when its work is done, also on an accelerator: the caller's clock is the measure.
    Tokens are the most likely ones, the same as when each sequence is decoded alone.
    """

    count: int
    length: int
    block_tokens: int

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        """The prefill: a sequence takes the free place `slot` (from 0 on). Its first token."""

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        """One decode step of the sequences at these places: the next token of each, in their order.

        Each of them has joined and goes on from the last token that it was given. A place that is left out waits.
        """

    def leave(self, slot: int) -> None:
        """The sequence ends, and its place and its blocks are free."""

    def close(self) -> None:
        """All sequences end, and the memory is given back."""


@runtime_checkable
class ServingRuntime(DecodingRuntime, Protocol):
    """Further methods of a backend whose sequences join and leave between steps."""

    def slots(self, count: int, length: int, block_tokens: int) -> Slots:
        """Free places; those that it gave before are gone, and these go as soon as anything else is decoded.

        Raises UnsupportedError where the stack or the model cannot decode so, and says why.
        """


@dataclass(frozen=True)
class Streamed:
    """One completion of a server. All times are of `time.perf_counter`, in seconds.

    `first_s` is when the first token came, None if none did. `token_times_s` has the time of each of `tokens`; None
    where one chunk held several, and `untimed` says so. `chunk_times_s` are those of the chunks. `tokens` is the
    server's own count, 0 before it gave one, and `prompt_tokens` that of the prompt. `finished` is True when the stream
    came to its end with as many tokens as were asked for; otherwise `error` says in a sentence why not, and `refused`
    that the server, asked in another way, may do it, or `overdue` that it was not waited for any longer. `text` is what
    came, and `ids` its tokens where the server tells them.
    """

    first_s: float | None
    token_times_s: tuple[float, ...] | None
    tokens: int
    finished: bool
    error: str | None
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunk_times_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    text: str = ""
    ids: tuple[int, ...] | None = None
    untimed: str | None = None
    refused: bool = False
    overdue: bool = False


class Streams(Protocol):
    """Connections to a server; any number of `stream` calls may run at once."""

    async def stream(self, prompt: Sequence[int], new_tokens: int) -> Streamed:
        """Greedy decoding of `new_tokens` tokens after the ids of `prompt`. A failure is a Streamed with its error."""


@runtime_checkable
class StreamingRuntime(DecodingRuntime, Protocol):
    """Further methods of a backend that speaks to a server, which has a queue of its own."""

    def streams(self) -> AbstractAsyncContextManager[Streams]:
        """New connections, closed with the context."""


@runtime_checkable
class TellingRuntime(EncodingRuntime, Protocol):
    """Further methods of a backend that gives no logits, and log-probabilities of the most likely tokens instead."""

    def telling(self, most: int | None, reference: str | None = None, *, by_chat: bool = False) -> Telling:
        """Finds out how the server, or the one that `reference` names, is to be asked, for `most` tokens at each
        position or the most below that it takes (None: up to 1,000). In a chat it predicts an answer to the text.
        Raises UnsupportedError where it tells none, or has other tokens."""


class Arrivals:
    """What came of each of so many sequences since `started_ns`, by `time.perf_counter_ns`."""

    def __init__(self, rows: int, started_ns: int) -> None:
        self._started_ns = started_ns
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._marks_ns: list[list[int]] = [[] for _ in range(rows)]

    def take(self, row: int, tokens: Sequence[int], now_ns: int) -> None:
        """The next tokens of a sequence."""
        self._tokens[row] += tokens
        self._marks_ns[row] += [now_ns] * len(tokens)

    def generation(self, new_tokens: int, engine: str) -> Generation:
        """A token of the batch counts when the last sequence has it.

        Raises OptiGPUError where a sequence has another number of tokens than was asked of the engine.
        """
        wrong = next((len(each) for each in self._tokens if len(each) != new_tokens), None)
        if wrong is not None:
            raise OptiGPUError(f"{engine} decoded {wrong} tokens instead of the {new_tokens} asked for.")
        last_ns = np.array(self._marks_ns, np.int64).max(axis=0)
        gaps_ns = np.diff(np.concatenate([[self._started_ns], last_ns]))
        return Generation(np.array(self._tokens, np.int64), [gap / 1e9 for gap in gaps_ns.tolist()])
