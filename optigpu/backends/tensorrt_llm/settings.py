"""What TensorRT-LLM is told of an order, as plain data: the names are those of its LLM class. And the tokens that it
answers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from optigpu.backends.base import Order
from optigpu.backends.serving import Arrivals
from optigpu.documents.shapes import ModelFacts
from optigpu.techniques.base import engine_options


@dataclass(frozen=True)
class LlmSettings:
    """The arguments of one engine, with room for one workload. Nothing of a prompt is kept for the next."""

    model: str
    dtype: str
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    reuses_blocks: bool = False

    @property
    def keywords(self) -> Mapping[str, object]:
        """The keyword arguments of LLM, with the cache's configuration as a mapping."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "max_batch_size": self.max_batch_size,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens,
            "skip_tokenizer_init": True,
            "kv_cache_config": {"enable_block_reuse": self.reuses_blocks},
        }


def settings_of(order: Order, folder: Path, facts: ModelFacts) -> LlmSettings:
    """The engine for an order's workload; float32 without a technique."""
    shape = order.workload.work_shape
    rows = getattr(shape, "batch_size", 1)
    tokens = getattr(shape, "prompt_tokens", facts.longest) + getattr(shape, "new_tokens", 0)
    length = min(tokens, facts.longest)
    return LlmSettings(
        model=str(folder),
        dtype=engine_options(order.stack).weights,
        max_batch_size=rows,
        max_seq_len=length,
        max_num_tokens=rows * length,
    )


def sampling_of(new_tokens: int) -> Mapping[str, object]:
    """The keyword arguments of SamplingParams: greedy, exactly so many tokens.

    `end_id` must be named where there is no tokenizer, and ends nothing, since it is ignored.
    """
    return {"max_tokens": new_tokens, "top_k": 1, "end_id": 0, "ignore_eos": True, "detokenize": False}


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
