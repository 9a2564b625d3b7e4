"""What engines other than torch answer alike: which workloads they run, and what their runtimes cannot say.

And the runtime of an engine that gives logits step by step. Imports no engine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.base import Order
from optigpu.backends.runtime import Generation, Ids, Logits, MemoryPeaks, Pass, Profile, Runtime
from optigpu.documents.facts import Footprint, ImageFootprint, ModelFacts, WeightFacts
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.engines.environments import RECIPES, not_installed
from optigpu.techniques.base import Notes, Technique
from optigpu.vocabulary import DeviceKind, OptiGPUError, OutOfMemoryError, UnsupportedError
from optigpu.workloads.base import Workload

Number = TypeVar("Number", bound=np.generic)
_OF_AN_ALLOCATION = ("bad_alloc", "failed to allocate memory")
"""In lower case: C++'s words and ONNX Runtime's."""


class EngineBackend:
    """A Backend that runs some workloads and offers no operators of its own.

    `install` is the command that installs its `packages`. `modules` import the engine, by names relative to its folder.
    The one called `runtime` has `prepared`, which does what `prepare` is asked for.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)
    packages: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = ""
    workloads: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]] = (".runtime",)

    def missing(self, environment: Environment) -> str | None:
        """What is not installed, its environment or its packages, with the command that installs it, or None."""
        if self.name in RECIPES:
            return not_installed(self.name)
        absent = [package for package in self.packages if package not in environment.software]
        if not absent:
            return None
        are, them = ("is", "it") if len(absent) == 1 else ("are", "them")
        return f"{' and '.join(absent)} {are} not installed; install {them} with: {self.install}"

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Why it cannot run a workload, or None: it has random tokens, greedy decoding and random images."""
        if workload.kind not in self.workloads:
            kinds = ", ".join(self.workloads)
            return f"{self.name} does not run the workload {workload.kind}; it runs {kinds}."
        if workload.has_labels:
            return f"{self.name} reads no images; leave images out, or ask for the backend torch."
        if workload.is_sampled or workload.has_text:
            return (
                f"{self.name} decodes random prompts greedily; leave prompt, temperature and top_p out, or ask for the "
                "backend torch."
            )
        return None

    def start(self, *, model: bool) -> None:
        """Imports the engine."""
        for module in self.modules:
            import_module(module, type(self).__module__)

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Imports the engine as well."""
        runtime: Runtime = import_module(".runtime", type(self).__module__).prepared(order, progress)
        return runtime

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            f"{self.name} has no operators to measure the machine's peaks with; ask the backend torch for them."
        )

    def use_threads(self, count: int) -> None:
        """Nothing, where an engine is told its threads when a model is loaded."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an allocation failed, as engines on a CPU say it."""
        return allocation_failed(error)


def unknown_kernels(reason: str) -> dict[str, str]:
    """The reason for both facts about attention."""
    return dict.fromkeys(("attn_implementation", "attention_kernels"), reason)


def allocation_failed(error: Exception) -> bool:
    """Whether an error of an engine on a CPU means that memory ran out."""
    if isinstance(error, (MemoryError, OutOfMemoryError)):
        return True
    said = str(error).lower()
    return any(words in said for words in _OF_AN_ALLOCATION)


class EngineRuntime:
    """A Runtime on a CPU, of an engine without a profiler. `engine` is its name in sentences."""

    engine: str
    _weights: WeightFacts
    _footprint: Footprint | ImageFootprint | None = None

    def weights(self) -> WeightFacts:
        """The bytes as the engine holds them, where it tells; the hash is that of what they were made of."""
        return self._weights

    def footprint(self) -> Footprint | ImageFootprint | None:
        """What a step or a pass reads; None where the engine does not say."""
        return self._footprint

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """There is no accelerator; the meter itself measures the host's memory."""
        return self._no_peaks(f"{self.engine} runs on the CPU here, which has no memory of an accelerator.")

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"OptiGPU has no profiler for {self.engine}; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Nothing: nobody watches a CPU from outside."""
        return nullcontext()

    def observe(self, inputs: object) -> None:
        """Nothing: the engine does not name the kernels that it runs."""

    def compute_exactly(self) -> None:
        """Nothing: the stack or the file decides how exactly it computes, and no reference is made of it."""

    @staticmethod
    def _no_peaks(reason: str, *others: str) -> MemoryPeaks:
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes", *others), reason))


class DecodingEngine(EngineRuntime):
    """An EngineRuntime that decodes; it knows its longest decoding. One without logits has `no_logits`, the reason."""

    no_logits: ClassVar[str]
    decoded: tuple[int, int] | None = None

    def logits(self, tokens: Ids) -> Logits:
        """The last token goes through the step that is timed."""
        return next(self.score(tokens, tokens.shape[1] - 1))

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """Raises UnsupportedError where there are none."""
        raise UnsupportedError(self.no_logits)

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """Raises UnsupportedError where there are none."""
        raise UnsupportedError(self.no_logits)

    def _remember(self, rows: int, length: int) -> None:
        if self.decoded is None or self.decoded[0] != rows or self.decoded[1] < length:
            self.decoded = (rows, length)


def room_of(order: Order, facts: ModelFacts, *, scored: bool = True) -> tuple[int, int]:
    """The sequences and the tokens of each that a workload decodes; with one more, which scoring predicts."""
    shape = order.workload.work_shape
    rows = getattr(shape, "batch_size", 1)
    tokens = getattr(shape, "prompt_tokens", facts.longest) + getattr(shape, "new_tokens", 0)
    return rows, min(tokens + scored, facts.longest)


def timed_pass(
    run: Callable[[], NDArray[Number]], logits: Callable[[NDArray[Number]], Logits] = np.copy
) -> Pass:
    """Times `run`, which gives scores [rows, classes], and the choice of the most likely class of each row.

    `logits` makes of the scores what they stand for, outside of that time.
    """
    started = time.perf_counter_ns()
    scores = run()
    chosen = scores.argmax(axis=-1)
    seconds = (time.perf_counter_ns() - started) / 1e9
    return Pass(logits(scores), chosen, seconds)


def weights_of_file(
    path: Path, sha256: str, *, size: int, parameters: int, quantized: float | None = None
) -> WeightFacts:
    """The weights of one file, which its hash identifies; `size` is what the engine holds of them, in bytes."""
    return WeightFacts(
        bytes=size,
        parameters=parameters,
        quantized=quantized,
        hash=sha256,
        hash_of="files",
        files={path.name: sha256},
        reasons={"revision": "A file has no revision; the weight hash identifies it."},
    )


class Steps(Protocol):
    """`rows` sequences of at most `length` tokens that an engine decodes together."""

    rows: int
    length: int

    def begin(self) -> None:
        """Forgets the sequences."""

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count] to the sequences, which have room for them. Logits after the last token of
        each, [rows, vocabulary], which may lie in the engine's memory, and are valid until the next call.
        """

    def close(self) -> None:
        """Gives the memory of the sequences back."""


class SteppedRuntime(DecodingEngine):
    """A DecodingRuntime of an engine on a CPU. Sequences are made by the first request, and anew for larger ones."""

    def __init__(
        self,
        order: Order,
        notes: Notes,
        *,
        engine: str,
        facts: ModelFacts,
        steps: Callable[[int, int], Steps],
        weights: WeightFacts,
        footprint: Footprint | None,
    ) -> None:
        """`steps` makes the sequences for so many rows and so many tokens."""
        self.device, self.seed, self.notes = order.device, order.seed, notes
        self.engine, self.facts = engine, facts
        self._made, self._weights, self._footprint = steps, weights, footprint
        self._steps: Steps | None = None

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding; the first of the gaps is that of the prompt's pass."""
        rows, length = prompt.shape[0], prompt.shape[1] + new_tokens
        steps = self._steps_for(rows, length)
        self._remember(rows, length)
        tokens = np.empty((rows, new_tokens), np.int64)
        marks = [time.perf_counter_ns()]
        steps.begin()
        inputs = prompt
        for step in range(new_tokens):
            inputs = tokens[:, step : step + 1] = steps.forward(inputs).argmax(axis=1, keepdims=True)
            marks.append(time.perf_counter_ns())
        return Generation(tokens, [gap / 1e9 for gap in np.diff(marks).tolist()])

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """Token by token after a prompt of `prefill` tokens."""
        for logits in self._scored(tokens, prefill):
            yield logits.copy()

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """Without the copies of the logits."""
        self._steps_for(tokens.shape[0], tokens.shape[1])
        started = time.perf_counter_ns()
        for _ in self._scored(tokens, prefill):
            pass
        return (time.perf_counter_ns() - started) / 1e9

    def _scored(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        rows, length = tokens.shape
        steps = self._steps_for(rows, length)
        self._remember(rows, length + 1)  # the last token predicts one more
        steps.begin()
        if prefill:
            steps.forward(tokens[:, :prefill])
        for position in range(prefill, tokens.shape[1]):
            yield steps.forward(tokens[:, position : position + 1])

    def _steps_for(self, rows: int, length: int) -> Steps:
        if length > self.facts.longest:
            raise OptiGPUError(
                f"The model's context is {self.facts.longest} tokens, and {length} do not fit; ask for fewer tokens."
            )
        known = self._steps
        if known is None or known.rows != rows or known.length < length:
            if known is not None:
                known.close()
                self._steps = None
            known = self._steps = self._made(rows, length)
        return known
