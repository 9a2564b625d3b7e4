"""TensorRT-LLM's LLM class as what workloads and meters ask of."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import tensorrt_llm
from tensorrt_llm import LLM, SamplingParams

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of
from optigpu.backends.folders import folder_of
from optigpu.backends.runtime import Generation, Ids, Logits, MemoryPeaks, Profile
from optigpu.backends.serving import Arrivals
from optigpu.backends.tensorrt_llm.settings import LlmSettings, arrived, sampling_of, settings_of
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import ModelFacts
from optigpu.models.described import decoder_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError

NO_LOGITS = "TensorRT-LLM is asked for tokens alone here, so the quality of its steps is not known."
NOT_TOLD = "TensorRT-LLM's executor does not tell how much of the GPU's memory a request takes."
NOT_SAID = "TensorRT-LLM does not say which kernels of attention run."


def prepared(order: Order, progress: Callable[[str], None]) -> "TensorRtLlmRuntime":
    """Makes the engine for the order's workload. Raises UnsupportedError for a model that it does not know."""
    facts = decoder_facts(parse_reference(str(order.model)))
    settings = settings_of(order, folder_of("tensorrt_llm", order, progress), facts)
    progress("loading")
    try:
        return TensorRtLlmRuntime(order, LLM(**settings.keywords), settings, facts)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise UnsupportedError(f"TensorRT-LLM cannot run {order.model}: {str(error)[:300]}") from error


class TensorRtLlmRuntime:
    """A DecodingRuntime of one engine: every sequence of a batch is a request that begins at once."""

    def __init__(self, order: Order, engine: LLM, settings: LlmSettings, facts: ModelFacts) -> None:
        self.device, self.seed, self.facts = order.device, order.seed, facts
        self.decoded: tuple[int, int] | None = None
        self.notes = Notes()
        self.notes.record(
            dtype=settings.dtype,
            kv_cache="paged",
            decode_loop="TensorRT-LLM",
            versions={"tensorrt-llm": tensorrt_llm.__version__},
            reasons=dict.fromkeys(("attn_implementation", "attention_kernels"), NOT_SAID),
        )
        self._engine, self._weights = engine, weights_of(order)
        self._runner = asyncio.Runner()

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding; a token's time is when the last sequence has it."""
        rows, length = prompt.shape
        self.decoded = max(self.decoded or (0, 0), (rows, length + new_tokens))
        return self._runner.run(self._generated(prompt.tolist(), new_tokens))

    def logits(self, tokens: Ids) -> Logits:
        """Raises UnsupportedError: there are none."""
        raise UnsupportedError(NO_LOGITS)

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """Raises UnsupportedError: there are no logits."""
        raise UnsupportedError(NO_LOGITS)

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """Raises UnsupportedError: there are no logits."""
        raise UnsupportedError(NO_LOGITS)

    def weights(self) -> WeightFacts:
        """The hash is that of the files; their bytes in the engine are not told."""
        return self._weights

    def footprint(self) -> None:
        """Not told."""
        return

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """The executor has a process of its own."""
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes"), NOT_TOLD))

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """The executor's kernels are not told apart here."""
        raise UnsupportedError("OptiGPU has no profiler for TensorRT-LLM; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """The executor has a process of its own, which a range here would not reach."""
        return nullcontext()

    def observe(self, prompt: Ids) -> None:
        """TensorRT-LLM does not name the kernels that it runs."""

    async def _generated(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        parameters = SamplingParams(**sampling_of(new_tokens))
        arrivals = Arrivals(len(prompts), time.perf_counter_ns())
        requests = [self._engine.generate_async(prompt, parameters, streaming=True) for prompt in prompts]
        await arrived(requests, arrivals, time.perf_counter_ns)
        return arrivals.generation(new_tokens, "TensorRT-LLM")
