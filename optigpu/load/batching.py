"""Continuous batching: a queue before the places of an engine, whose sequences join and leave between decode steps.

In each pass all that wait join while there are free places, the first come first, each by a prefill of its own; then
one decode step gives each sequence its next token, and those that have all of theirs leave.
Source: Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, OSDI 2022.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optigpu.load.queries import Load, Query, go_on
from optigpu.load.served import Run, Seen, Served

if TYPE_CHECKING:  # a backend imports the workloads, which import this
    from optigpu.backends.serving import Slots


class Clock:
    """The machine's own clock, in seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Returns at that moment, or at once if it is over."""
        time.sleep(max(0.0, moment - time.perf_counter()))


class VirtualClock(Clock):
    """The clock of a simulation: it stands still until somebody waits, or says that time has passed."""

    def __init__(self) -> None:
        self._moment = 0.0

    def now(self) -> float:
        return self._moment

    def wait_until(self, moment: float) -> None:
        self._moment = max(self._moment, moment)

    def pass_by(self, seconds: float) -> None:
        self._moment += seconds


@dataclass(frozen=True)
class Sent:
    """A query, and the moment at which it was to be sent, in seconds from the run's begin."""

    query: Query
    intended_s: float


class Sender:
    """Sends the queries of a load, whose run begins now. Moments are in seconds from there."""

    def __init__(self, load: Load, clock: Clock) -> None:
        self._ahead, self._following = deque(load.first), load.following
        self._clock, self._began = clock, clock.now()
        self._has_clients = load.clients is not None
        self._sent: list[Sent] = []
        for _ in range(load.clients or 0):
            self._send(0.0)

    def arrived(self, now_s: float) -> Sequence[Sent]:
        """The queries that have come since the last call, in their order."""
        while not self._has_clients and self._ahead and self._ahead[0].arrival_s <= now_s:
            self._send(self._ahead[0].arrival_s)
        found, self._sent = self._sent, []
        return found

    def ended(self, served: Served) -> None:
        """A query was answered: its client, if it has one, sends the next, and so does who had a conversation."""
        if self._has_clients:
            self._send(served.ended_s)
        if following := self._following.get(served.query.number):
            self._sent.append(Sent(following, served.ended_s))

    def wait(self) -> bool:
        """Called when the server is empty: returns when a query has come, or False when there will be no more."""
        if self._sent or self._has_clients or not self._ahead:
            return bool(self._sent)
        self._clock.wait_until(self._began + self._ahead[0].arrival_s)
        return True

    def _send(self, moment_s: float) -> None:
        if self._ahead:
            self._sent.append(Sent(self._ahead.popleft(), moment_s))


@dataclass
class _Running:
    """A sequence that has joined."""

    sent: Sent
    noticed_s: float
    first_s: float
    tokens: list[int]


class Batching:
    """A Server of an engine in this process, in one thread with the sender. A query that comes while the engine works
    is noticed after the step, and its latency counts from its own moment."""

    def __init__(self, slots: "Slots", clock: Clock | None = None) -> None:
        self._slots, self._clock = slots, clock or Clock()

    def run(self, load: Load, prompts: Sequence[list[int]]) -> Run:
        """Ends when every query has all of its tokens."""

        def prompt(query: Query) -> Sequence[int]:
            if query.after is not None:
                before = self._answered[query.after]
                go_on(prompts, before.query, before.tokens, query)
            return prompts[query.number]

        return self.serve(Sender(load, self._clock), prompt)

    def serve(self, sender: Sender, prompt: Callable[[Query], Sequence[int]]) -> Run:
        """Ends when the sender says that no more will come, and all are answered. `prompt` gives the token ids."""
        self._began = self._clock.now()
        self._queue: deque[tuple[Sent, float]] = deque()
        self._running: dict[int, _Running] = {}
        self._seen: list[Seen] = []
        self._answered = dict[int, Served]()
        free, served = deque(range(self._slots.count)), list[Served]()
        self._notice(sender)
        while self._queue or self._running or sender.wait():
            self._notice(sender)
            while self._queue and free:
                (sent, noticed_s), slot = self._queue.popleft(), free.popleft()
                token = self._slots.join(slot, prompt(sent.query))
                self._running[slot] = _Running(sent, noticed_s, self._now_s, [token])
            for slot, done in self._step() if self._running else ():
                self._slots.leave(slot)
                free.append(slot)
                served.append(done)
                self._answered[done.query.number] = done
                sender.ended(done)
        served.sort(key=lambda each: (each.intended_s, each.query.number))
        return Run(tuple(served), tuple(self._seen), self._now_s)

    @property
    def _now_s(self) -> float:
        return self._clock.now() - self._began

    def _notice(self, sender: Sender) -> None:
        now_s = self._now_s
        self._queue.extend((sent, now_s) for sent in sender.arrived(now_s))
        self._count(now_s)

    def _step(self) -> list[tuple[int, Served]]:
        """One token for each sequence. Returns those that are whole, with their places."""
        places, done = list(self._running), []
        tokens = self._slots.step(places)
        now_s = self._now_s
        for slot, token in zip(places, tokens, strict=True):
            each = self._running[slot]
            each.tokens.append(token)
            query, count = each.sent.query, len(each.tokens)
            if count >= query.new_tokens:
                del self._running[slot]
                moments = (each.sent.intended_s, each.noticed_s, each.first_s, now_s)
                done.append((slot, Served(query, *moments, count=count, tokens=tuple(each.tokens))))
        self._count(now_s)
        return done

    def _count(self, now_s: float) -> None:
        self._seen.append(Seen(now_s, len(self._queue) + len(self._running)))
