"""Work that a thread does while a `with` block lasts."""

import contextvars
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

LAST_ROUND_S = 5.0
"""How long the end of the block waits for a round that hangs in a database that is away."""


class Background(ABC):
    """The base class of such work. `_over` is set at the end of the block.

    The thread logs as the block does: with the job's id, for example.
    """

    def __init__(self, name: str) -> None:
        self._over = threading.Event()
        self._name = name
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        block = contextvars.copy_context()
        self._thread = threading.Thread(target=block.run, args=(self._run,), name=self._name, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(LAST_ROUND_S)

    @abstractmethod
    def _run(self) -> None:
        """Rounds of work, with waits for `_over` in between; raises nothing."""
