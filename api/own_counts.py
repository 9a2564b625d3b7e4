"""The calls of one process, counted in memory."""

import time

from limits.storage import MemoryStorage

SWEEP_S = 60.0


class OwnCounts(MemoryStorage):
    """The library's, but what is over is removed by those who count, once a minute.

    The library starts a thread to remove it after ten milliseconds, and another one at the next call after that: a
    hundred threads a second, for each of which a call waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sweep_at = time.time() + SWEEP_S

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Counts so many calls more; returns how many they are now."""
        now = time.time()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            for over in [each for each, at in list(self.expirations.items()) if at <= now]:
                self.clear(over)
        self.get(key)  # removes it if it is over
        with self.locks[key]:
            self.storage[key] += amount
            if self.storage[key] == amount:
                self.expirations[key] = now + expiry
            return self.storage[key]
