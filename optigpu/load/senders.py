"""Who sends the queries of a load to a queue in the same process, and when."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from optigpu.load.clock import Clock
from optigpu.load.queries import Load, Query
from optigpu.load.served import Served


@dataclass(frozen=True)
class Sent:
    """A query, and the moment at which it was to be sent, in seconds from the run's begin."""

    query: Query
    intended_s: float


class Sender(Protocol):
    """What a queue asks between two steps. Moments are in seconds from the run's begin."""

    def arrived(self, now_s: float) -> Sequence[Sent]:
        """The queries that have come since the last call, in their order."""

    def ended(self, served: Served) -> None:
        """A query was answered."""

    def wait(self) -> bool:
        """Called when the server is empty: returns when a query has come, or False when there will be no more."""


class Scheduled:
    """Sends each query at its moment, whatever became of the others."""

    def __init__(self, queries: Sequence[Query], clock: Clock) -> None:
        """The run begins now."""
        self._ahead = deque(queries)
        self._clock, self._began = clock, clock.now()

    def arrived(self, now_s: float) -> Sequence[Sent]:
        """Those whose moment has come."""
        found = []
        while self._ahead and self._ahead[0].arrival_s <= now_s:
            query = self._ahead.popleft()
            found.append(Sent(query, query.arrival_s))
        return found

    def ended(self, served: Served) -> None:
        """Makes no difference."""

    def wait(self) -> bool:
        """Until the next one's moment."""
        if not self._ahead:
            return False
        self._clock.wait_until(self._began + self._ahead[0].arrival_s)
        return True


class Clients:
    """So many clients that each send their next query as soon as the last one has ended."""

    def __init__(self, queries: Sequence[Query], clients: int) -> None:
        self._ahead = deque(queries)
        self._sent: list[Sent] = []
        for _ in range(clients):
            self._send(0.0)

    def arrived(self, now_s: float) -> Sequence[Sent]:
        """Those of the clients whose last query has ended."""
        found, self._sent = self._sent, []
        return found

    def ended(self, served: Served) -> None:
        """Its client sends the next."""
        self._send(served.ended_s)

    def wait(self) -> bool:
        """Whether there are queries left."""
        return bool(self._sent)

    def _send(self, moment_s: float) -> None:
        if self._ahead:
            self._sent.append(Sent(self._ahead.popleft(), moment_s))


def sender_of(load: Load, clock: Clock) -> Sender:
    """The sender of a load whose run begins now."""
    if load.clients is None:
        return Scheduled(load.queries, clock)
    return Clients(load.queries, load.clients)
