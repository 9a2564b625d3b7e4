"""What a load asks of an engine: sequences that join and leave between decode steps, or a server's streams."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from optigpu.backends.runtime import DecodingRuntime


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


class Streamed(Protocol):
    """One completion of a server. Times are of `time.perf_counter`, in seconds.

    `first_s` is when the first token came, None if none did; `tokens` is the server's own count, `ids` has them where
    it tells them, and `prompt_tokens` is how many it counted of the prompt. `finished` is True where the stream came to
    its end with as many tokens as were asked for; otherwise `error` says why not, and `overdue` that it took too long.
    """

    @property
    def sent_s(self) -> float: ...
    @property
    def first_s(self) -> float | None: ...
    @property
    def ended_s(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...] | None: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def finished(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def overdue(self) -> bool: ...


class Streams(Protocol):
    """Connections to a server; any number of `stream` calls may run at once."""

    async def stream(self, prompt: Sequence[int], new_tokens: int) -> Streamed:
        """Greedy decoding of `new_tokens` tokens after the ids of `prompt`. A failure is a Streamed with its error."""


@runtime_checkable
class StreamingRuntime(DecodingRuntime, Protocol):
    """Further methods of a backend that speaks to a server, which has a queue of its own."""

    def streams(self) -> AbstractAsyncContextManager[Streams]:
        """New connections, closed with the context."""
