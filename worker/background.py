"""Work that a thread does while a `with` block lasts."""

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

LAST_ROUND_S = 5.0
"""How long the end of the block waits for a round that hangs in a database that is away."""


class Background(ABC):
    """The base class of such work. `_over` is set at the end of the block."""

    def __init__(self, name: str) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(LAST_ROUND_S)

    @abstractmethod
    def _run(self) -> None:
        """Rounds of work, with waits for `_over` in between; raises nothing."""
