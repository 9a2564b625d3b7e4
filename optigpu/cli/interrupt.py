"""Ctrl-C, SIGTERM and the end of the terminal as a request to stop a job and to keep what is finished."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "the end of its terminal",
}
"""The signals that stop a job, and what they are called."""


class Stop:
    """Whether somebody asked for an end."""

    def __init__(self) -> None:
        self._number: signal.Signals | None = None

    def ask(self, number: int, _: object) -> None:
        """The signals' handler. The second signal ends the command at once."""
        if self._number is not None:
            raise KeyboardInterrupt
        self._number = signal.Signals(number)

    def __call__(self) -> str | None:
        """The reason to stop, if there is one."""
        return f"The job was cancelled by {SIGNALS[self._number]}." if self._number is not None else None

    @property
    def status(self) -> int:
        """The exit status of a command that was stopped, as a shell gives it."""
        return 128 + (self._number or signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Yields what a run asks for a reason to stop. A signal that was ignored when the command started stays ignored."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
