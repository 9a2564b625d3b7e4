"""The error for a failed reading, and a thread that reads a sensor regularly."""

import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

from optigpu.vocabulary import OptiGPUError

Reading = TypeVar("Reading")


class SensorError(OptiGPUError):
    """A sensor is missing, refuses access, or gives implausible values; the text names the cause and what to do."""


def or_none(read: Callable[[], Reading]) -> Reading | None:
    """A reading; None where the sensor does not give it."""
    try:
        return read()
    except SensorError:
        return None


class Ticker:
    """Calls `take` at once, then every `period_s` in its own thread, and once more at the end of the block.

    The calls never overlap. An error ends them; it is raised at the block's end unless the block itself failed, and
    `failed` is true before that. The thread has ended when the block is left, also after an error.
    """

    THREAD = "optigpu-ticker"

    def __init__(self, take: Callable[[], None], period_s: float) -> None:
        self._take = take
        self._period_s = period_s
        self._over = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=self.THREAD, daemon=True)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def __enter__(self) -> Self:
        self._take()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        self._thread.join()
        if error is not None:
            return
        if self._error is not None:
            raise self._error
        self._take()

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self._period_s, time.perf_counter())  # missed calls are not repeated
            if self._over.wait(due - time.perf_counter()):
                return
            try:
                self._take()
            except Exception as error:
                self._error = error
                return
