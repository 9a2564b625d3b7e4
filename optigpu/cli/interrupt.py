"""Ctrl-C as a request to stop a job and to keep what is finished."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C stopped."""


@contextmanager
def stoppable() -> Iterator[Callable[[], str | None]]:
    """Yields what a run asks for a reason to stop: Ctrl-C is one. A second Ctrl-C ends the command at once."""
    asked: list[str] = []

    def ask(*_: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append("The job was cancelled by Ctrl-C.")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked[0] if asked else None
    finally:
        signal.signal(signal.SIGINT, before)
