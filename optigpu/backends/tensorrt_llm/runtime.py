"""TensorRT-LLM's LLM class as what workloads and meters ask of."""

import asyncio
import time
from collections.abc import Callable

import tensorrt_llm
from tensorrt_llm import LLM, SamplingParams

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of
from optigpu.backends.engine import DecodingEngine, room_of, unknown_kernels
from optigpu.backends.export import folder_of
from optigpu.backends.runtime import Generation, Ids, MemoryPeaks
from optigpu.backends.serving import Arrivals
from optigpu.documents.facts import ModelFacts
from optigpu.models.described import decoder_facts
from optigpu.techniques.base import Notes, engine_options
from optigpu.vocabulary import UnsupportedError


def prepared(order: Order, progress: Callable[[str], None]) -> "TensorRtLlmRuntime":
    """Makes the engine for the order's workload. Raises UnsupportedError for a model that it does not know."""
    facts = decoder_facts(order.reference)
    folder = folder_of("tensorrt_llm", order, progress)
    rows, length = room_of(order, facts, scored=False)
    progress("loading")
    try:
        engine = LLM(
            model=str(folder),
            dtype=engine_options(order.stack).weights,
            max_batch_size=rows,
            max_seq_len=length,
            max_num_tokens=rows * length,
            skip_tokenizer_init=True,
            kv_cache_config={"enable_block_reuse": False},  # nothing of a prompt is kept for the next
        )
    except (ValueError, NotImplementedError, KeyError) as error:
        raise UnsupportedError(f"TensorRT-LLM cannot run {order.model}: {str(error)[:300]}") from error
    return TensorRtLlmRuntime(order, engine, facts)


class TensorRtLlmRuntime(DecodingEngine):
    """A DecodingRuntime of one engine: every sequence of a batch is a request that begins at once.

    The executor has a process of its own.
    """

    engine = "TensorRT-LLM"
    no_logits = "TensorRT-LLM is asked for tokens alone here, so the quality of its steps is not known."

    def __init__(self, order: Order, engine: LLM, facts: ModelFacts) -> None:
        self.device, self.seed, self.facts = order.device, order.seed, facts
        self.notes = Notes()
        self.notes.record(
            dtype=engine_options(order.stack).weights,
            kv_cache="paged",
            decode_loop=self.engine,
            versions={"tensorrt-llm": tensorrt_llm.__version__},
            reasons=unknown_kernels("TensorRT-LLM does not say which kernels of attention run."),
        )
        self._llm, self._weights = engine, weights_of(order)
        self._runner = asyncio.Runner()

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding; a token's time is when the last sequence has it."""
        rows, length = prompt.shape
        self._remember(rows, length + new_tokens)
        return self._runner.run(self._generated(prompt.tolist(), new_tokens))

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """Not told."""
        return self._no_peaks(
            "TensorRT-LLM's executor does not tell how much of the GPU's memory a request takes."
        )

    async def _generated(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        """Exactly so many tokens of each, greedily. Where there is no tokenizer an `end_id` must be named; it ends
        nothing."""
        parameters = SamplingParams(
            max_tokens=new_tokens, top_k=1, end_id=0, ignore_eos=True, detokenize=False
        )
        arrivals = Arrivals(len(prompts), time.perf_counter_ns())

        async def read(row: int) -> None:
            known = 0
            async for output in requests[row]:  # each holds all tokens of its request so far
                ids = list(output.outputs[0].token_ids)
                arrivals.take(row, ids[known:], time.perf_counter_ns())
                known = len(ids)

        requests = [self._llm.generate_async(prompt, parameters, streaming=True) for prompt in prompts]
        await asyncio.gather(*(read(row) for row in range(len(prompts))))
        return arrivals.generation(new_tokens, self.engine)
