"""What a run of a load leaves: the moments of each query, and what was seen under way. With the streams of a server
elsewhere: each query is one, sent at its moment whatever became of the others.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from optigpu.load.queries import Load, Query, go_on
from optigpu.vocabulary import OptiGPUError

if TYPE_CHECKING:
    from optigpu.backends.serving import Streamed, Streams


@dataclass(frozen=True)
class Served:
    """One query that was answered. Moments are in seconds from the run's begin.

    `intended_s` is when it was to be sent: latencies count from there, so that a server that stands still, or a sender
    that comes late, does not hide the wait. `noticed_s` is when it really reached the queue, or left the sender.
    `tokens` are their ids where the engine gives them, and `error` says why a query has fewer than it asked for.
    """

    query: Query
    intended_s: float
    noticed_s: float
    first_s: float
    ended_s: float
    count: int
    tokens: tuple[int, ...] = ()
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.intended_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.ended_s - self.first_s) / max(self.count - 1, 1)

    @property
    def latency_s(self) -> float:
        """The whole request."""
        return self.ended_s - self.intended_s

    @property
    def late_s(self) -> float:
        """How long after its moment the query was noticed."""
        return self.noticed_s - self.intended_s


@dataclass(frozen=True)
class Seen:
    """How many queries were under way from that moment on, as the server's own counter had it."""

    moment_s: float
    count: int


@dataclass(frozen=True)
class Run:
    """A whole run, which began and ended with an empty server. `served` are in the order of their intended moments."""

    served: tuple[Served, ...]
    seen: tuple[Seen, ...]
    seconds: float


class Server(Protocol):
    """Something that takes the queries of a load and answers them."""

    def run(self, load: Load, prompts: Sequence[list[int]]) -> Run:
        """One run; `prompts` are the token ids of each query's prompt, by its number."""


class Streaming:
    """A Server behind a network. The queue and the batch are its own affair."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager["Streams"]]) -> None:
        """`connect` makes new connections, closed with the context."""
        self._connect = connect

    def run(self, load: Load, prompts: Sequence[list[int]]) -> Run:
        """Ends when every stream has ended, whole or not. Raises OptiGPUError for one that is overdue: a server that
        hangs would keep each query that follows as long."""
        self._prompts, self._following, self._under_way = prompts, load.following, 0
        self._served: list[Served] = []
        self._seen: list[Seen] = []
        seconds = asyncio.run(self._send_all(load))
        served = sorted(self._served, key=lambda each: (each.intended_s, each.query.number))
        return Run(tuple(served), tuple(self._seen), seconds)

    async def _send_all(self, load: Load) -> float:
        ahead = deque(load.queries)

        async def at_its_moment(query: Query) -> None:
            await asyncio.sleep(max(0.0, query.arrival_s - self._now_s))
            ended_s = await self._send(streams, query, query.arrival_s)
            while following := self._following.get(query.number):
                query = following
                ended_s = await self._send(streams, query, ended_s)

        async def client() -> None:
            ended_s = 0.0
            while ahead:
                ended_s = await self._send(streams, ahead.popleft(), ended_s)

        async with self._connect() as streams:
            self._began = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as tasks:
                    if load.clients is None:
                        for query in load.first:
                            tasks.create_task(at_its_moment(query))
                    for _ in range(min(load.clients or 0, len(ahead))):
                        tasks.create_task(client())
            except ExceptionGroup as group:  # the first error ended the other tasks
                raise group.exceptions[0] from group
            return self._now_s

    @property
    def _now_s(self) -> float:
        return time.perf_counter() - self._began

    async def _send(self, streams: "Streams", query: Query, intended_s: float) -> float:
        """Returns when the stream has ended."""
        noticed_s = self._now_s
        self._count(+1, noticed_s)
        streamed = await streams.stream(self._prompts[query.number], query.new_tokens)
        if streamed.overdue:
            raise OptiGPUError(str(streamed.error))
        ended_s = self._now_s
        self._count(-1, ended_s)
        # A stream without a first token has it at its end.
        first_s = ended_s if streamed.first_s is None else streamed.first_s - self._began
        moments = (intended_s, noticed_s, first_s, ended_s)
        problem = _problem(query, streamed)
        self._served.append(Served(query, *moments, streamed.tokens, streamed.ids or (), problem))
        if following := self._following.get(query.number):
            go_on(self._prompts, query, streamed.ids or (), following)
        return ended_s

    def _count(self, change: int, moment_s: float) -> None:
        self._under_way += change
        self._seen.append(Seen(moment_s, self._under_way))


def _problem(query: Query, streamed: "Streamed") -> str | None:
    if not streamed.finished:
        return streamed.error or "The stream ended without all of its tokens."
    if streamed.prompt_tokens not in (None, query.prompt_tokens):
        return (
            f"The server counted {streamed.prompt_tokens} tokens of a prompt of {query.prompt_tokens}: its tokenizer "
            "is another one; name the model that it serves."
        )
    return None
