"""What workloads and meters ask of a graph that is run in single passes: over prompts, or over images."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.runtime import Ids, Images, Logits, MemoryPeaks, Pass, Profile
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import Footprint, ImageFootprint
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError

ON_CPU = "ONNX Runtime runs on the CPU here, which has no memory of an accelerator."
Inputs = TypeVar("Inputs", Ids, Images)


@dataclass(frozen=True)
class LoadedPasses(Generic[Inputs]):
    """A model whose `run` makes logits of inputs; they are valid until the next call."""

    run: Callable[[Inputs], Logits]
    weights: WeightFacts
    footprint: Footprint | ImageFootprint


class OnnxPassRuntime(Generic[Inputs]):
    """A PassRuntime on a CPU."""

    def __init__(self, order: Order, loaded: LoadedPasses[Inputs], notes: Notes) -> None:
        self.device, self.seed, self.notes = order.device, order.seed, notes
        self.facts = loaded.footprint.facts
        self._loaded: LoadedPasses[Inputs] = loaded

    def forward(self, inputs: Inputs) -> Pass:
        """Its time ends when the most likely token or class of each row is chosen, as every backend's does."""
        ready = np.ascontiguousarray(inputs)
        started = time.perf_counter_ns()
        logits = self._loaded.run(ready)
        chosen = logits.argmax(axis=-1)
        seconds = (time.perf_counter_ns() - started) / 1e9
        return Pass(logits.copy(), chosen, seconds)

    def observe(self, inputs: Inputs) -> None:
        """ONNX Runtime does not name the kernels that it runs."""

    def compute_exactly(self) -> None:
        """Nothing: the stack decides how exactly it computes, and no reference is made of it."""

    def weights(self) -> WeightFacts:
        """The bytes as they were written; the hash is that of the weights that they were converted from."""
        return self._loaded.weights

    def footprint(self) -> Footprint | ImageFootprint:
        """What a pass reads."""
        return self._loaded.footprint

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """There is no accelerator; the host's memory is the meter's own affair."""
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes"), ON_CPU))

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """Its profiler names nodes, no kernels."""
        raise UnsupportedError("OptiGPU has no profiler for ONNX Runtime; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Nobody watches a CPU from outside."""
        return nullcontext()
