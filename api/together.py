"""Work that is done for all requests that wait for it, at once, in one thread.

All that arrive while the thread works share its next turn. Python runs one thread at a time, and each turn of a thread
and each message to the database costs about as much as a whole answer: so together requests cost a fraction of what
each alone would.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Waiting(NamedTuple, Generic[Asked, Answer]):
    """What was asked, and where its answer goes."""

    asked: Asked
    answer: asyncio.Future[Answer]

    def settle(self, found: Answer | Exception) -> None:
        """Gives the answer, unless there is one or its client has gone."""
        if self.answer.done():
            return
        if isinstance(found, Exception):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


class Together(Generic[Asked, Answer]):
    """`answers` has one answer for each thing that is asked, in order; an exception is raised where it was asked.

    Those of a turn are handed over together at its end, or as they are found, `at_once` of them.
    """

    def __init__(
        self,
        answers: Callable[[Sequence[Asked]], Iterable[Answer | Exception]],
        name: str,
        at_once: int | None = None,
    ) -> None:
        self._answers = answers
        self._at_once = at_once
        self._waiting: list[Waiting[Asked, Answer]] = []
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, name)

    async def ask(self, asked: Asked) -> Answer:
        """The answer, or an error that is its own or, if all failed, that of all."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(asked, answer))
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
            try:
                await loop.run_in_executor(self._thread, self._turn, waiting, loop)
            except Exception as error:  # whatever it was, it is the error of those that have no answer
                for each in waiting:
                    each.settle(error)
        self._working = None

    def _turn(self, waiting: Sequence[Waiting[Asked, Answer]], loop: asyncio.AbstractEventLoop) -> None:
        answers = self._answers([each.asked for each in waiting])
        settled = zip(waiting, answers, strict=True)
        while some := tuple(islice(settled, self._at_once)):
            loop.call_soon_threadsafe(_settle, some)


def _settle(settled: Iterable[tuple[Waiting[Asked, Answer], Answer | Exception]]) -> None:
    for waiting, answer in settled:
        waiting.settle(answer)
