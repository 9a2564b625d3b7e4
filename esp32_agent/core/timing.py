"""Ticks that wrap around, a sum of them that does not, the time of day as far as it is known, and pauses between
attempts: twice as long after each failure, and never the same for two devices."""

from esp32_agent.port.base import Board, Clock

PERIOD = 1 << 30
"""Microseconds after which a 32-bit board's ticks begin anew: 1,074 s."""
EARLIEST_US = 1577836800_000000
"""2020-01-01. A clock before it was never set."""
LATEST_US = 4102444800_000000
"""2100-01-01."""


def add(ticks: int, delta: int, period: int = PERIOD) -> int:
    """`ticks` moved on by `delta`, which may be negative."""
    return (ticks + delta) % period


def diff(later: int, earlier: int, period: int = PERIOD) -> int:
    """`later - earlier`, from -period/2 to just below period/2, whether or not the ticks wrapped in between."""
    half = period >> 1
    return (later - earlier + half) % period - half


class Stopwatch:
    """Microseconds since it was made, however often the ticks wrap: ask it at least once in half a period (536 s)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.ticks_us()
        self._total_us = 0

    def us(self) -> int:
        now = self._clock.ticks_us()
        lap = self._clock.ticks_diff(now, self._last)
        if lap > 0:  # a clock that steps back stands still here
            self._total_us += lap
        self._last = now
        return self._total_us


class WallClock:
    """The time of day: the port's own, or the server's where the port's is not known or was refused."""

    def __init__(self, clock: Clock, uptime: Stopwatch) -> None:
        self._clock = clock
        self._uptime = uptime
        self._boot_us = 0  # the server's time at the stopwatch's zero; 0 while the port's own clock is used

    def unix_us(self) -> int:
        """Microseconds since 1970, or 0 while the time is not known."""
        if self._boot_us:
            return self._boot_us + self._uptime.us()
        own = self._clock.unix_us()
        return own if EARLIEST_US <= own < LATEST_US else 0

    def set(self, server_time_us: object) -> bool:
        """Follow the server's clock from now on; False where that is no time between 2020 and 2100."""
        if not isinstance(server_time_us, int) or not EARLIEST_US <= server_time_us < LATEST_US:
            return False
        self._boot_us = server_time_us - self._uptime.us()
        return True

    def refresh(self, server_time_us: object) -> None:
        """Take the time of a server's answer, if no better clock is there."""
        if self._boot_us or self.unix_us() == 0:
            self.set(server_time_us)


class Backoff:
    def __init__(self, board: Board, first_ms: int, most_ms: int) -> None:
        self._board = board
        self._first_ms = first_ms
        self._most_ms = most_ms
        self._failures = 0

    def next_ms(self) -> int:
        """The pause after one more failure, drawn from the upper half of what is due."""
        due_ms = min(self._first_ms << min(self._failures, 20), self._most_ms)
        self._failures += 1
        half = due_ms // 2
        return due_ms - half + int.from_bytes(self._board.random_bytes(4), "big") % (half + 1)

    def reset(self) -> None:
        self._failures = 0
