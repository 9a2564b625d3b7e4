"""The flag that says that this process shall end."""

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
        """Says that the process shall end; safe in a signal handler."""
        self.asked = True
        self._wake.put(None)

    def wait(self, seconds: float) -> bool:
        """Sleeps for `seconds` or until somebody asks; says whether somebody has. For one thread only."""
        if not self.asked:
            with suppress(queue.Empty):
                self._wake.get(timeout=seconds)
        return self.asked
