"""What TensorRT-LLM answers: the tokens that each request has so far."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from optigpu.backends.arrivals import Arrivals


class Completion(Protocol):
    """One output of a request so far."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All of its tokens."""


class RequestOutput(Protocol):
    """What a request has so far; of a greedy one there is one output."""

    @property
    def outputs(self) -> Sequence[Completion]:
        """One for each sequence that was asked for."""


async def arrived(
    requests: Sequence[AsyncIterator[RequestOutput]], arrivals: Arrivals, now: Callable[[], int]
) -> None:
    """Reads the streams of all requests together; each output holds all tokens of its request so far."""

    async def read(row: int, outputs: AsyncIterator[RequestOutput]) -> None:
        known = 0
        async for output in outputs:
            ids = list(output.outputs[0].token_ids)
            arrivals.take(row, ids[known:], now())
            known = len(ids)

    await asyncio.gather(*(read(row, outputs) for row, outputs in enumerate(requests)))
