"""The clock of a host, whose system keeps the time of day."""

import time

from esp32_agent.port.base import Clock


class HostClock(Clock):
    """Its ticks do not wrap around."""

    def ticks_us(self) -> int:
        return time.perf_counter_ns() // 1000

    def ticks_diff(self, later: int, earlier: int) -> int:
        return later - earlier

    def sleep_ms(self, ms: int) -> None:
        time.sleep(ms / 1000)

    def unix_us(self) -> int:
        return time.time_ns() // 1000

    def synchronise(self) -> bool:
        return True
