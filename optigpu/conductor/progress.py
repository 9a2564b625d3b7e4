"""The job's clock: asks whether to stop, and tells how far the job is."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from optigpu.documents.events import Event, Progressed
from optigpu.vocabulary import CancelledError, DeadlineError

EVERY_S = 1.0

Unit = tuple[int, int]
"""A replicate of a variant: the variant's index and the replicate's number."""


@dataclass(frozen=True)
class _Stretch:
    """What the present unit is moving through: from one share to another within some seconds."""

    began: float
    start: float
    end: float
    seconds: float

    def share(self, now: float) -> float:
        if not self.seconds:
            return self.start
        return self.start + (self.end - self.start) * min((now - self.began) / self.seconds, 0.99)


class Watch:
    """Counts replicates as the units of a job, each with the share of it that is done."""

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
        self._stretch = _Stretch(self._started, 0.0, 0.0, 0.0)
        self._typical_s: dict[float, float] = {}
        self._fraction = 0.0

    def limit(self, timeout_s: float) -> None:
        """From now on the job has `timeout_s` seconds."""
        self._started = time.monotonic()
        self._timeout_s, self._deadline = timeout_s, self._started + timeout_s

    @contextmanager
    def half_of_what_is_left(self, what: str) -> Iterator[None]:
        """`what` may take half of the job's time that is left, so that one process that hangs costs the others less."""
        self._half = (time.monotonic() + (self._deadline - time.monotonic()) / 2, what)
        try:
            yield
        finally:
            self._half = (math.inf, "")

    def at(self, index: int, replicate: int, doing: str) -> None:
        """What comes next belongs to this unit; told at once."""
        self._settle()
        self._unit = (index, replicate)
        self._stretch = _Stretch(time.monotonic(), self._share, self._share, 0.0)
        self.doing(doing)

    def doing(self, what: str) -> None:
        """What the unit is busy with; told at once."""
        self._doing = what
        self._tell()

    def toward(self, share: float, seconds: float | None = None) -> None:
        """The unit is moving to `share` of its end, within `seconds`; None takes what the last unit needed for it."""
        self._settle()
        expected = self._typical_s.get(share, 0.0) if seconds is None else seconds
        self._stretch = _Stretch(time.monotonic(), self._share, share, expected)

    def reached(self) -> None:
        """The unit is where it was moving to."""
        self._typical_s[self._stretch.end] = time.monotonic() - self._stretch.began
        self._put(self._stretch.end)

    def finish(self) -> None:
        """The unit is over."""
        self._put(1.0)
        self.doing("done")

    def give_up(self, index: int) -> None:
        """Nothing more of this variant will be measured."""
        for unit in self._shares:
            if unit[0] == index:
                self._shares[unit] = 1.0
        self.doing("given up")

    def tick(self) -> None:
        """Tells how far the job is, once a second. To be called more often than that.

        Raises CancelledError when the job was cancelled and DeadlineError when its time is up.
        """
        reason = self._cancelled()
        if reason is not None:
            raise CancelledError(reason)
        if time.monotonic() > self._deadline:
            raise DeadlineError(
                f"deadline: the job's {self._timeout_s:g} seconds are over; raise limits.timeout_s or ask for less."
            )
        if time.monotonic() > self._half[0]:
            raise DeadlineError(
                f"deadline: {self._half[1]} took half of the time that the job had left; raise limits.timeout_s."
            )
        if time.monotonic() - self._told >= EVERY_S:
            self._tell()

    @property
    def _share(self) -> float:
        return self._shares.get(self._unit, 0.0)

    def _put(self, share: float) -> None:
        if self._unit in self._shares:
            self._shares[self._unit] = max(share, self._share)
        self._stretch = _Stretch(time.monotonic(), self._share, self._share, 0.0)

    def _settle(self) -> None:
        """Keeps how far the present unit got before another one comes into view."""
        self._put(self._stretch.share(time.monotonic()))

    def _tell(self) -> None:
        self._told = time.monotonic()
        moving = max(0.0, self._stretch.share(self._told) - self._share)
        done = (sum(self._shares.values()) + moving) / max(len(self._shares), 1)
        # A later and longer expectation must not make the bar go back.
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
        """By what the share that is done has taken; unknown until a first process stands ready."""
        if self._fraction >= 1:
            return 0.0
        if not self._typical_s:
            return None
        elapsed_s = self._told - self._started
        return max(0.0, min(elapsed_s * (1 / self._fraction - 1), self._deadline - self._told))
