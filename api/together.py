"""Work that is done for all requests that wait for it, at once, in one thread.

All that arrive while the thread works share its next turn. Python runs one thread at a time, and each turn of a thread
and each message to the database costs about as much as a whole answer: so together requests cost a fraction of what
each alone would.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Together(Generic[Asked, Answer]):
    """`answers` has one answer for each thing that is asked, in order; an exception is raised where it was asked."""

    def __init__(self, answers: Callable[[Sequence[Asked]], Sequence[Answer | Exception]], name: str) -> None:
        self._answers = answers
        self._waiting: list[tuple[Asked, asyncio.Future[Answer]]] = []
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, name)

    async def ask(self, asked: Asked) -> Answer:
        """The answer, or an error that is its own or, if all failed, that of all."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await answer

    def close(self) -> None:
        """Ends the thread when it has done what waits for it."""
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            asked = [each for each, _ in waiting]
            found: Sequence[Answer | Exception]
            try:
                found = await loop.run_in_executor(self._thread, self._answers, asked)
            except Exception as error:  # whatever it was, it is the requests' error
                found = [error] * len(waiting)
            for (_, future), answer in zip(waiting, found, strict=True):
                if future.done():  # its client has gone
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        self._working = None
