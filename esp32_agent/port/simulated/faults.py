"""What goes wrong on a simulated device, and how often; drawn from the device's own seed."""

import random

RATES = {
    "lost_answer": 0.02,  # of requests: the service has answered, and the answer never arrives
    "upload_reset": 0.01,  # of requests: the connection breaks in the middle of the body
    "reboot": 0.01,  # of requests: the power is cut before it, after it, or while a report is stored
    "storage_full": 0.01,  # of reports: the medium takes a part and is full
    "unsynchronised": 0.1,  # of devices: the clock was never set
    "skew": 0.1,  # of devices: the clock is hours off
    "drift": 0.2,  # of devices: the ticks run up to 1% fast or slow
}
"""Every fault with the share that `all` gives it."""


class Reboot(BaseException):
    """The power was cut: nothing on the device may catch it."""


class Faults:
    """The faults of one device; `counts` says how often each has struck."""

    def __init__(self, rates: dict[str, float], seed: str) -> None:
        self._rates = rates
        self._random = random.Random(seed)
        self.counts: dict[str, int] = {}

    def strikes(self, name: str) -> bool:
        """Draws; counts a fault that strikes."""
        rate = self._rates.get(name, 0.0)
        if rate <= 0 or self._random.random() >= rate:
            return False
        self.counts[name] = self.counts.get(name, 0) + 1
        return True

    def one_of(self, *names: str) -> str:
        """One of these, each as often."""
        return self._random.choice(names)

    def within(self, least: float, most: float) -> float:
        """A number between these."""
        return self._random.uniform(least, most)
