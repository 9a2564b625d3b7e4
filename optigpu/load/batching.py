"""Continuous batching: a queue before the places of an engine, whose sequences join and leave between decode steps.

In each pass all that wait join while there are free places, the first come first, each by a prefill of its own; then
one decode step gives each sequence its next token, and those that have all of theirs leave.
Source: Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, OSDI 2022.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optigpu.load.clock import Clock, WallClock
from optigpu.load.queries import Load, Query
from optigpu.load.senders import Sender, Sent, sender_of
from optigpu.load.served import Run, Seen, Served

if TYPE_CHECKING:  # a backend imports the workloads, which import this
    from optigpu.backends.serving import Slots

Prompt = Callable[[Query], Sequence[int]]
"""The token ids of a query's prompt."""


class Batching:
    """A Server of an engine in this process. Sender and engine take turns in one thread; neither slows the other.

    A query that comes while the engine works is noticed after the step, and its latency counts from its own moment.
    """

    def __init__(self, slots: "Slots", clock: Clock | None = None) -> None:
        self._slots, self._clock = slots, clock or WallClock()

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> Run:
        """Ends when every query has all of its tokens."""
        return self.serve(sender_of(load, self._clock), lambda query: prompts[query.number])

    def serve(self, sender: Sender, prompt: Prompt) -> Run:
        """Ends when the sender says that no more will come, and all are answered."""
        return _Serving(self._slots, self._clock, sender, prompt).run()


@dataclass
class _Running:
    """A sequence that has joined."""

    sent: Sent
    noticed_s: float
    first_s: float
    tokens: list[int]

    def ended(self, moment_s: float) -> Served:
        tokens, query = tuple(self.tokens), self.sent.query
        moments = (self.sent.intended_s, self.noticed_s, self.first_s, moment_s)
        return Served(query, *moments, count=len(tokens), tokens=tokens)


class _Serving:
    """One run."""

    def __init__(self, slots: "Slots", clock: Clock, sender: Sender, prompt: Prompt) -> None:
        self._slots, self._clock, self._sender, self._prompt = slots, clock, sender, prompt
        self._began = clock.now()
        self._queue: deque[tuple[Sent, float]] = deque()
        self._free = deque(range(slots.count))
        self._running: dict[int, _Running] = {}
        self._served: list[Served] = []
        self._seen: list[Seen] = []

    def run(self) -> Run:
        """Passes, until nothing is left."""
        self._notice()
        while self._queue or self._running or self._sender.wait():
            self._notice()
            self._admit()
            if self._running:
                self._step()
        served = sorted(self._served, key=lambda each: (each.intended_s, each.query.number))
        return Run(tuple(served), tuple(self._seen), self._now_s)

    @property
    def _now_s(self) -> float:
        return self._clock.now() - self._began

    def _notice(self) -> None:
        """Takes what has arrived."""
        now_s = self._now_s
        self._queue.extend((sent, now_s) for sent in self._sender.arrived(now_s))
        self._count(now_s)

    def _admit(self) -> None:
        while self._queue and self._free:
            (sent, noticed_s), slot = self._queue.popleft(), self._free.popleft()
            token = self._slots.join(slot, self._prompt(sent.query))
            self._running[slot] = _Running(sent, noticed_s, self._now_s, [token])

    def _step(self) -> None:
        """One token for each sequence; those that are whole leave."""
        places = list(self._running)
        tokens = self._slots.step(places)
        now_s = self._now_s
        for slot, token in zip(places, tokens, strict=True):
            running = self._running[slot]
            running.tokens.append(token)
            if len(running.tokens) >= running.sent.query.new_tokens:
                self._leave(slot, now_s)
        self._count(now_s)

    def _leave(self, slot: int, now_s: float) -> None:
        served = self._running.pop(slot).ended(now_s)
        self._slots.leave(slot)
        self._free.append(slot)
        self._served.append(served)
        self._sender.ended(served)

    def _count(self, now_s: float) -> None:
        self._seen.append(Seen(now_s, len(self._queue) + len(self._running)))
