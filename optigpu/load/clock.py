"""The clock of a load: the machine's own, or one that a simulation moves."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from any beginning, and a wait."""

    def now(self) -> float:
        """The present moment in seconds."""

    def wait_until(self, moment: float) -> None:
        """Returns at that moment, or at once if it is over."""


class WallClock:
    """time.perf_counter."""

    def now(self) -> float:
        """The present moment in seconds."""
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Sleeps."""
        left_s = moment - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class VirtualClock:
    """Stands still until somebody waits, or says that time has passed."""

    def __init__(self) -> None:
        self._moment = 0.0

    def now(self) -> float:
        """The moment that was reached."""
        return self._moment

    def wait_until(self, moment: float) -> None:
        """Is there at once."""
        self._moment = max(self._moment, moment)

    def pass_by(self, seconds: float) -> None:
        """Something took so long."""
        self._moment += seconds
