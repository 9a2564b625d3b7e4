"""The clock of MicroPython: wrap-around ticks, and the real-time clock set from NTP."""

import os
import time

from esp32_agent.port import ntp
from esp32_agent.port.base import Clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS_1970_TO_2000 = 946_684_800
EARLIEST_US = 1_735_689_600_000_000
"""2025-01-01: a clock before that was never set."""
TIMEOUT_S = 5


class BoardClock(Clock):
    """`set_time(unix_us)` sets the real-time clock, by which TLS judges certificates; None: the system keeps it."""

    def __init__(self, server: str = "", set_time: "Callable[[int], None] | None" = None) -> None:
        self._server = server
        self._set_time = set_time
        self._epoch_us = SECONDS_1970_TO_2000 * 1_000_000 if time.gmtime(0)[0] == 2000 else 0

    def ticks_us(self) -> int:
        return time.ticks_us()

    def ticks_diff(self, later: int, earlier: int) -> int:
        return time.ticks_diff(later, earlier)

    def sleep_ms(self, ms: int) -> None:
        time.sleep_ms(ms)

    def unix_us(self) -> int:
        now = time.time_ns() // 1000 + self._epoch_us
        return now if now >= EARLIEST_US else 0

    def synchronise(self) -> bool:
        if self._set_time is not None:
            try:
                now = ntp.ask(self._server, ntp.NTP_PORT, self, os.urandom(8), TIMEOUT_S)
            except OSError:
                now = None
            if now is not None and now >= EARLIEST_US:
                self._set_time(now)
        return self.unix_us() > 0


def set_rtc(unix_us: int) -> None:
    """Sets the ESP32's real-time clock, whose last field counts microseconds."""
    import machine

    offset = SECONDS_1970_TO_2000 if time.gmtime(0)[0] == 2000 else 0
    year, month, day, hour, minute, second, weekday = time.gmtime(unix_us // 1_000_000 - offset)[:7]
    machine.RTC().datetime((year, month, day, weekday, hour, minute, second, unix_us % 1_000_000))
