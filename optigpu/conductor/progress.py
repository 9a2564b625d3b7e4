"""A job's progress and its limits."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from optigpu.documents.events import Event, Progressed
from optigpu.vocabulary import CancelledError, DeadlineError

PROGRESS_PERIOD_S = 1.0

Unit = tuple[int, int]
"""A replicate of a variant: the variant's index and the replicate's number."""


@dataclass(frozen=True)
class _Advance:
    """The present replicate is expected to go from one share of its work to another within some seconds."""

    began: float
    start: float
    end: float
    seconds: float

    def share(self, now: float) -> float:
        if not self.seconds:
            return self.start
        return self.start + (self.end - self.start) * min((now - self.began) / self.seconds, 0.99)


class JobProgress:
    """Counts a job's replicates, each with the share of its work that is done, and checks the job's limits.

    For each replicate: `begin`, `advance` around each part of its work, `end`. Replicates of several variants may be
    begun again and again, in turns.
    """

    def __init__(
        self,
        on_event: Callable[[Event], None],
        cancelled: Callable[[], str | None],
        indexes: Collection[int],
        replicates: int,
    ) -> None:
        """`indexes` are those of the variants that will be measured."""
        self._on_event, self._cancelled = on_event, cancelled
        self._shares: dict[Unit, float] = {(i, r): 0.0 for i in indexes for r in range(replicates)}
        self._timeout_s, self._deadline = math.inf, math.inf
        self._half = (math.inf, "")
        self._unit: Unit = next(iter(self._shares), (0, 0))
        self._doing = "waiting for the device"
        self._started, self._told = time.monotonic(), -math.inf
        self._advance = _Advance(self._started, 0.0, 0.0, 0.0)
        self._typical_s: dict[float, float] = {}
        self._fraction = 0.0

    def limit(self, timeout_s: float) -> None:
        """From now on the job has `timeout_s` seconds."""
        self._started = time.monotonic()
        self._timeout_s, self._deadline = timeout_s, self._started + timeout_s

    @contextmanager
    def half_of_the_time_left(self, what: str) -> Iterator[None]:
        """Allows `what` half of the time that the job has left, so that a process that hangs costs the others less."""
        self._half = (time.monotonic() + (self._deadline - time.monotonic()) / 2, what)
        try:
            yield
        finally:
            self._half = (math.inf, "")

    def begin(self, index: int, replicate: int, doing: str) -> None:
        """Work on this replicate starts or continues; reported at once."""
        self._settle()
        self._unit = (index, replicate)
        self._stay()
        self.show(doing)

    def show(self, doing: str) -> None:
        """Sets the text for what the current replicate does; reported at once."""
        self._doing = doing
        self._tell()

    @contextmanager
    def advance(self, share: float, seconds: float | None = None) -> Iterator[None]:
        """The block brings the present replicate to `share` of its work, if nothing is raised.

        `seconds` is how long that is expected to take; None takes what the replicate before needed.
        """
        self._settle()
        expected = self._typical_s.get(share, 0.0) if seconds is None else seconds
        began = time.monotonic()
        self._advance = _Advance(began, self._share, share, expected)
        yield
        self._typical_s[share] = time.monotonic() - began
        self._put(share)

    def end(self) -> None:
        """The present replicate is measured."""
        self._put(1.0)
        self.show("done")

    def give_up(self, index: int) -> None:
        """The variant has failed: its remaining replicates are not measured."""
        for unit in self._shares:
            if unit[0] == index:
                self._shares[unit] = 1.0
        self.show("given up")

    def check(self) -> None:
        """Reports the progress once a second; must be called more often.

        Raises CancelledError when the job was cancelled and DeadlineError when its time is up.
        """
        reason = self._cancelled()
        if reason is not None:
            raise CancelledError(reason)
        if time.monotonic() > self._deadline:
            raise DeadlineError(
                f"deadline: the job reached its time limit of {self._timeout_s:g} s; raise limits.timeout_s or "
                "measure less."
            )
        if time.monotonic() > self._half[0]:
            raise DeadlineError(
                f"deadline: {self._half[1]} took half of the time that the job had left; raise limits.timeout_s."
            )
        if time.monotonic() - self._told >= PROGRESS_PERIOD_S:
            self._tell()

    @property
    def _share(self) -> float:
        return self._shares.get(self._unit, 0.0)

    def _put(self, share: float) -> None:
        if self._unit in self._shares:
            self._shares[self._unit] = max(share, self._share)
        self._stay()

    def _stay(self) -> None:
        """The present replicate stays at its share until something advances it."""
        self._advance = _Advance(time.monotonic(), self._share, self._share, 0.0)

    def _settle(self) -> None:
        """Keeps how far the present replicate has come."""
        self._put(self._advance.share(time.monotonic()))

    def _tell(self) -> None:
        self._told = time.monotonic()
        moving = max(0.0, self._advance.share(self._told) - self._share)
        done = (sum(self._shares.values()) + moving) / max(len(self._shares), 1)
        # A longer expectation must not move the progress bar back.
        self._fraction = min(1.0, max(self._fraction, done))
        self._on_event(
            Progressed(
                index=self._unit[0],
                replicate=self._unit[1],
                doing=self._doing,
                fraction=self._fraction,
                remaining_s=self._remaining_s(),
            )
        )

    def _remaining_s(self) -> float | None:
        """Predicts from the time of the work so far; None until a first process is ready."""
        if self._fraction >= 1:
            return 0.0
        if not self._typical_s:
            return None
        elapsed_s = self._told - self._started
        return max(0.0, min(elapsed_s * (1 / self._fraction - 1), self._deadline - self._told))
