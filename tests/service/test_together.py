"""What many requests wait for is done at once, and each has its own answer."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from api.together import Together

AT_ONCE = 4


def test_what_arrives_while_the_thread_works_is_done_in_its_next_turn() -> None:
    turns: list[list[int]] = []
    begun, goes_on = threading.Event(), threading.Event()

    def answers(asked: Sequence[int]) -> list[int | Exception]:
        turns.append(list(asked))
        begun.set()
        goes_on.wait(30)
        return [ValueError("odd") if each % 2 else 10 * each for each in asked]

    async def ask(together: Together[int, int]) -> list[int | BaseException]:
        first = asyncio.create_task(together.ask(0))
        await asyncio.to_thread(begun.wait, 30)
        others = [asyncio.create_task(together.ask(number)) for number in range(1, 5)]
        others[3].cancel()
        await asyncio.sleep(0)
        goes_on.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    with closing(Together[int, int](answers, "test")) as together:
        found = asyncio.run(ask(together))
    assert turns[0] == [0]
    assert turns[1][:3] == [1, 2, 3]
    assert len(turns) == 2
    assert (found[0], found[2]) == (0, 20)
    assert all(isinstance(found[number], ValueError) for number in (1, 3))
    assert isinstance(found[4], asyncio.CancelledError)


def test_an_error_of_a_turn_is_that_of_all_who_waited_for_it() -> None:
    def answers(asked: Sequence[int]) -> list[int | Exception]:
        raise RuntimeError(f"{len(asked)} failed")

    with closing(Together[int, int](answers, "test")) as together:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="1 failed"):
                asyncio.run(together.ask(1))


def test_the_first_answers_do_not_wait_for_the_last() -> None:
    begun, goes_on, last = threading.Event(), threading.Event(), threading.Event()

    def answers(asked: Sequence[int]) -> Iterator[int]:
        begun.set()
        goes_on.wait(30)
        for each in asked:
            if each == 9:
                last.wait(30)
            yield 10 * each

    async def ask(together: Together[int, int]) -> tuple[int, list[int]]:
        first = asyncio.create_task(together.ask(0))
        await asyncio.to_thread(begun.wait, 30)
        others = [asyncio.create_task(together.ask(number)) for number in range(1, 10)]
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(first, *others[:AT_ONCE])
        done_before = sum(other.done() for other in others)
        last.set()
        return done_before, await asyncio.gather(*others)

    with closing(Together[int, int](answers, "test", AT_ONCE)) as together:
        done_before, found = asyncio.run(ask(together))
    assert AT_ONCE <= done_before < 9
    assert found == [10 * number for number in range(1, 10)]


def test_an_error_in_the_middle_of_a_turn_is_that_of_those_without_an_answer() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def answers(asked: Sequence[int]) -> Iterator[int]:
        begun.set()
        goes_on.wait(30)
        for each in asked:
            if each == AT_ONCE + 1:
                raise RuntimeError("the database has gone")
            yield each

    async def ask(together: Together[int, int]) -> list[int | BaseException]:
        first = asyncio.create_task(together.ask(0))
        await asyncio.to_thread(begun.wait, 30)
        others = [asyncio.create_task(together.ask(number)) for number in range(1, AT_ONCE + 3)]
        await asyncio.sleep(0)
        goes_on.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    with closing(Together[int, int](answers, "test", AT_ONCE)) as together:
        found = asyncio.run(ask(together))
    assert found[: AT_ONCE + 1] == list(range(AT_ONCE + 1))
    assert [type(each) for each in found[AT_ONCE + 1 :]] == [RuntimeError, RuntimeError]
