"""What a run of a load leaves: the moments of each query, and what was seen under way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from optigpu.load.queries import Load, Query


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

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> Run:
        """One run; `prompts` are the token ids of each query's prompt, by its number."""
