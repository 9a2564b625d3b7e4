"""The flag that tells this process to stop."""

import queue
from contextlib import suppress


class Stopping:
    """Set once, by a signal handler, and asked by every loop of the worker.

    `threading.Event.set` may deadlock when a signal interrupts its own `wait`; `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        self.asked = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ask(self) -> None:
        """Tells the process to stop; safe in a signal handler."""
        self.asked = True
        self._wake.put(None)

    def wait(self, seconds: float) -> bool:
        """Sleeps for `seconds` or until `ask` is called; returns whether it was. For one thread only."""
        if not self.asked:
            with suppress(queue.Empty):
                self._wake.get(timeout=seconds)
        return self.asked
