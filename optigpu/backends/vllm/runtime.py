"""vLLM's engine as what workloads and meters ask of.

Given tokens are forced through vLLM's own steps, and the logits that each step computed are kept. vLLM makes the
processor itself and hands it each request's parameters: a request names its row in `extra_args`, and finds what to
force in `SCORED`. Engine and measuring process are one, so that both see the same object.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of
from optigpu.backends.engine import DecodingEngine, room_of, unknown_kernels
from optigpu.backends.export import folder_of
from optigpu.backends.runtime import Generation, Ids, Logits, MemoryPeaks
from optigpu.backends.serving import Arrivals
from optigpu.backends.vllm import EngineSettings, cache_gib, settings_of
from optigpu.documents.facts import ModelFacts
from optigpu.models.described import decoder_facts
from optigpu.techniques.base import Notes
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError

ROW = "optigpu_row"


@dataclass
class Row:
    """One sequence: the tokens to force one after the other, and the logits before each, [vocabulary]."""

    forced: Sequence[int]
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    def step(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Keeps the logits; those that it returns allow the forced token alone. After the last one all are allowed."""
        position = len(self.logits)
        self.logits.append(logits.detach().float().cpu().numpy().copy())
        if position >= len(self.forced):
            return logits
        allowed = torch.full_like(logits, float("-inf"))
        allowed[self.forced[position]] = 0
        return allowed


SCORED: dict[int, Row] = {}
"""The rows that are being scored, by their number."""


class Forcing(AdapterLogitsProcessor):  # type: ignore[misc]  # of a library without types
    """Applies to the requests that name a row, and to no other."""

    def is_argmax_invariant(self) -> bool:
        """It decides which token is chosen."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[Sequence[int], Tensor], Tensor] | None:
        """What a request's logits go through; None leaves them alone."""
        named: Mapping[str, object] = params.extra_args or {}
        row = named.get(ROW)
        return SCORED[row].step if isinstance(row, int) else None


def prepared(order: Order, progress: Callable[[str], None]) -> "VllmRuntime":
    """Makes the engine for the order's workload.

    Raises UnsupportedError for a model that vLLM does not know or cannot find here.
    """
    facts = decoder_facts(order.reference)
    settings = settings_of(order, folder_of("vllm", order, progress), facts)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib(settings, facts))
    logging.getLogger("vllm").setLevel(logging.WARNING)
    progress("loading")
    try:
        arguments = EngineArgs(**settings.keywords, logits_processors=[Forcing])
        engine = LLMEngine.from_engine_args(arguments)
    except (ValueError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UnsupportedError(f"vLLM cannot run {order.model}: {why}") from error
    return VllmRuntime(order, engine, settings, facts)


class VllmRuntime(DecodingEngine):
    """A DecodingRuntime that steps vLLM's engine itself: every sequence of a batch is a request that begins at once."""

    engine = "vLLM"

    def __init__(self, order: Order, engine: LLMEngine, settings: EngineSettings, facts: ModelFacts) -> None:
        self.device, self.seed, self.facts = order.device, order.seed, facts
        self.notes = Notes()
        self.notes.record(
            dtype=settings.dtype,
            kv_cache="paged",
            kv_cache_dtype=settings.dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype,
            decode_loop="vLLM",
            decode_operator="LLMEngine.step",
            threads=torch.get_num_threads(),
            versions={"vllm": vllm.__version__, "torch": torch.__version__},
            vllm_settings={name: value for name, value in settings.keywords.items() if name != "model"},
            reasons={
                **unknown_kernels("vLLM does not say which kernels of attention run."),
                "footprint": "vLLM merges and pads matrices, and does not say what a step reads.",
            },
        )
        self._engine, self._settings = engine, settings
        self._room = room_of(order, facts)
        # With padding, and None where vLLM packs them.
        (held,) = engine.collective_rpc(_bytes_of_worker)
        self._weights = weights_of(order).model_copy(update={"bytes": held})
        self._requests = 0

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding; a token's time is that of the engine's step that gave it, of the last sequence's."""
        rows, length = prompt.shape
        self._take_room(rows, length + new_tokens)
        return self._run(prompt.tolist(), new_tokens, [{}] * rows)

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """Given tokens are forced in the engine's own steps; only the first of a sequence may go through a prompt's."""
        first, length = max(prefill, 1), tokens.shape[1]
        found = self._scored(tokens, first)
        began = 0 if prefill == 0 else 1  # what follows the prompt alone was not asked for
        for step in range(began, length - first + 1):
            yield np.stack([row.logits[step] for row in found])

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """With the copies of the logits, which vLLM has no other way to hand out."""
        started = time.perf_counter_ns()
        self._scored(tokens, max(prefill, 1))
        return (time.perf_counter_ns() - started) / 1e9

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """On a GPU torch's own counts, which hold the whole cache that was set aside; there are none on a CPU."""
        if self.device is DeviceKind.CPU:
            return super().peak_memory(run)
        torch.cuda.reset_peak_memory_stats()
        run()
        return MemoryPeaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """A named range for a profiler that watches a GPU from outside."""
        return super().annotate(name) if self.device is DeviceKind.CPU else torch.cuda.nvtx.range(name)

    def _scored(self, tokens: Ids, first: int) -> list[Row]:
        """Each sequence with the logits after each of its tokens from index `first` - 1 on."""
        rows, length = tokens.shape
        self._take_room(rows, length + 1)
        SCORED.update({row: Row(tokens[row, first:].tolist()) for row in range(rows)})
        named = [{ROW: row} for row in range(rows)]
        try:
            self._run(tokens[:, :first].tolist(), length - first + 1, named)
            return [SCORED[row] for row in range(rows)]
        finally:
            SCORED.clear()

    def _run(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, extra: Sequence[Mapping[str, int]]
    ) -> Generation:
        """Steps the engine until every sequence has its tokens."""
        self._requests += 1
        places = {f"{self._requests}-{row}": row for row in range(len(prompts))}
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=dict(each) or None,
            )
            for each in extra
        ]
        arrivals = Arrivals(len(prompts), time.perf_counter_ns())
        for name, row in places.items():
            self._engine.add_request(name, {"prompt_token_ids": prompts[row]}, parameters[row])
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter_ns()
            for output in outputs:
                arrivals.take(places[output.request_id], output.outputs[0].token_ids, now)
        return arrivals.generation(new_tokens, "vLLM")

    def _take_room(self, rows: int, length: int) -> None:
        most, longest = self._room
        if rows > most or length > longest:
            raise OptiGPUError(
                f"This engine was made for {most} sequences of {longest} tokens; {rows} of {length} do not fit."
            )
        self._remember(rows, length)


def _bytes_of_worker(worker: "vllm.v1.worker.worker_base.WorkerBase") -> int | None:
    """What several layers share counts once. None where weights were packed for a library and left no tensor."""
    model: Module = worker.get_model()
    held = list(model.parameters())
    if not all(each.numel() for each in held):
        return None
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    return sum(storages.values())
