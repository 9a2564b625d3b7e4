"""An order as a runtime: the graph is written if it is not kept already, and loaded.

A classifier's graph, and that of a prompt, is run in single passes by ONNX Runtime's CPU provider.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import GraphOptimizationLevel, InferenceSession, IOBinding, SessionOptions

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, weights_of, whole
from optigpu.backends.converter_program import model_arguments
from optigpu.backends.onnxruntime import PACKAGES, convert
from optigpu.backends.onnxruntime.formats import MODEL, Contents, format_of, graph_level_of, parts_of
from optigpu.backends.runtime import Ids, Images, Logits, MemoryPeaks, Pass, Profile, Runtime
from optigpu.backends.stepped import Loaded, SteppedRuntime
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import Footprint, ImageFacts, ImageFootprint, ModelFacts
from optigpu.models.described import decoder_facts, image_facts
from optigpu.models.facts import known_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes, engine_options
from optigpu.vocabulary import OptiGPUError, Task, UnsupportedError

NAME = "ONNX Runtime"
NOT_SAID = "ONNX Runtime does not say which kernels run."
_WRITERS = ("classifier_graph", "convert", "decoder_graph", "formats", "graph", "static_int8")
CONVERTER = Converter(
    engine="onnxruntime",
    program=convert.__name__,
    suffix=".onnx",
    sources=tuple(Path(__file__).with_name(f"{name}.py") for name in _WRITERS),
    libraries=("torch", "transformers", *PACKAGES),
)
PROVIDER = "CPUExecutionProvider"
LEVELS = {
    "disabled": GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": GraphOptimizationLevel.ORT_ENABLE_ALL,
}
"""How far a session rewrites its graph."""
_ERRORS_ONLY = 3
ON_CPU = "ONNX Runtime runs on the CPU here, which has no memory of an accelerator."
Inputs = TypeVar("Inputs", Ids, Images)


def prepared(order: Order, progress: Callable[[str], None]) -> Runtime:
    """Raises UnsupportedError for a model that cannot be written as ONNX, OptiGPUError when writing fails."""
    if order.workload.task is Task.IMAGES:
        return _classifier(order, progress)
    contents, session = opened_decoder(order, progress)
    footprint = contents.footprint
    assert isinstance(footprint, Footprint), "the converter was told to write a decoder"
    notes = _notes(order, contents)
    notes.record(**_cache_notes(footprint.facts))
    weights = _weights(order, contents)
    if order.workload.task is Task.PREFILL:
        run = _Prompts(session, footprint.facts)
        return OnnxPassRuntime[Ids](order, LoadedPasses(run, weights, footprint), notes)
    facts = footprint.facts
    loaded = Loaded(
        NAME, facts, lambda rows, length: DecodingSteps(session, facts, rows, length), weights, footprint
    )
    return SteppedRuntime(order, loaded, notes)


def _classifier(order: Order, progress: Callable[[str], None]) -> Runtime:
    reference = parse_reference(str(order.model))
    known = known_facts(reference)
    facts = known if isinstance(known, ImageFacts) else image_facts(reference)
    size = getattr(order.workload, "image_size", None) or facts.image_size
    images = engine_options(order.stack).calibrated_on
    arguments = (*model_arguments(order), "--image-size", str(size))
    if images:
        arguments = (*arguments, "--calibration-images", str(images))
    folder = CONVERTER.made(order, f"images-{size}-{images or 0}", arguments, progress)
    contents, session = _loaded(folder, order, progress)
    footprint = contents.footprint
    assert isinstance(footprint, ImageFootprint), "the converter was told to write a classifier"

    def run(images: Images) -> Logits:
        logits: Logits = session.run(None, {"images": images})[0]
        return logits

    loaded = LoadedPasses[Images](run, _weights(order, contents), footprint)
    return OnnxPassRuntime[Images](order, loaded, _notes(order, contents))


class _Prompts:
    """Passes over whole prompts, each into empty keys and values."""

    def __init__(self, session: InferenceSession, facts: ModelFacts) -> None:
        self._session, self._facts = session, facts
        self._steps: DecodingSteps | None = None

    def __call__(self, prompts: Ids) -> Logits:
        """Logits after each prompt, [rows, vocabulary]."""
        rows, length = prompts.shape
        steps = self._steps
        if steps is None or (steps.rows, steps.length) != (rows, length):
            steps = self._steps = DecodingSteps(self._session, self._facts, rows, length)
        steps.begin()
        return steps.forward(prompts)


def opened_decoder(order: Order, progress: Callable[[str], None]) -> tuple[Contents, InferenceSession]:
    """The graph of a decoder, written before if it is not kept already. Raises as `prepared` does."""
    reference = parse_reference(str(order.model))
    try:
        parts_of(decoder_facts(reference).family)
    except UnsupportedError as error:
        raise UnsupportedError(f"onnxruntime cannot run {reference}: {error}") from error
    form = format_of(order.stack).name
    folder = CONVERTER.made(order, form, (*model_arguments(order), "--format", form), progress)
    return _loaded(folder, order, progress)


def _loaded(folder: Path, order: Order, progress: Callable[[str], None]) -> tuple[Contents, InferenceSession]:
    progress("loading")
    with whole(folder, NAME):
        return Contents.read(folder), opened(folder, order.threads, graph_level_of(order.stack))


def _weights(order: Order, contents: Contents) -> WeightFacts:
    own = {
        "bytes": contents.bytes,
        "parameters": contents.parameters,
        "quantized": min(1.0, contents.packed / contents.parameters) if contents.packed else None,
    }
    return weights_of(order).model_copy(update=own)


def _notes(order: Order, contents: Contents) -> Notes:
    notes = Notes()
    notes.record(
        dtype="float32",
        threads=order.threads,
        versions={name: version(name) for name in PACKAGES},
        reasons=dict.fromkeys(("attn_implementation", "attention_kernels"), NOT_SAID),
        onnx_tensor_types=contents.tensor_types,
        onnx_graph_level=graph_level_of(order.stack),
        **build_facts(),
    )
    return notes


def _cache_notes(facts: ModelFacts) -> dict[str, object]:
    """Of a decoder; in float32 whatever its matrices are in."""
    return {
        "kv_cache": "past_present_share_buffer",
        "kv_cache_dtype": "float32",
        "kv_cache_bytes_per_token": 2 * facts.layers * facts.kv_heads * facts.head_size * 4,
        "decode_loop": NAME,
        "decode_operator": "GroupQueryAttention",
    }


def opened(folder: Path, threads: int, level: str) -> InferenceSession:
    """The graph of a folder. Operators run one after another, each on all threads, which spin as by default.

    Raises RuntimeError for a file that is no graph.
    """
    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = _ERRORS_ONLY
    try:
        return InferenceSession(str(folder / MODEL), options, providers=[PROVIDER])
    except Exception as error:  # ONNX Runtime's have no base of their own
        raise RuntimeError(str(error)) from error


def build_facts() -> dict[str, object]:
    """How the library was built, for a result's notes."""
    return {
        "onnxruntime_build": onnxruntime.get_build_info(),
        "onnxruntime_providers": [PROVIDER],
        "onnxruntime_spinning": "the engine's default: threads spin while they wait",
    }


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


_CPU = ("cpu", 0)


class DecodingSteps:
    """`rows` sequences of at most `length` tokens.

    Keys and values lie in one buffer for each block, which is given as the past as well as the present: a step writes
    its own place alone.
    """

    def __init__(self, session: InferenceSession, facts: ModelFacts, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._session = session
        shape = (rows, facts.kv_heads, length, facts.head_size)
        self._kept = {
            f"{kind}_{number}": np.zeros(shape, np.float32)
            for number in range(facts.layers)
            for kind in ("key", "value")
        }
        self._logits: Logits = np.empty((rows, facts.vocabulary), np.float32)
        self._places = any(each.name == "positions" for each in session.get_inputs())
        self._passes: dict[int, _Pass] = {}
        self._used = 0

    def begin(self) -> None:
        """Forgets the sequences."""
        self._used = 0

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count]. The logits are valid until the next call.

        Raises OptiGPUError when the sequences would not fit the buffers, or a token is none of the vocabulary.
        """
        rows, count = tokens.shape
        if rows != self.rows or self._used + count > self.length:
            raise OptiGPUError(
                f"These buffers hold {self.rows} sequences of {self.length} tokens; {rows} sequences of "
                f"{self._used + count} tokens do not fit."
            )
        known = self._passes.get(count)
        if known is None:
            known = self._passes[count] = _Pass(rows, count, self._bound(), self._places)
        known.fill(tokens, self._used)
        try:
            self._session.run_with_iobinding(known.binding)
        except RuntimeError as error:
            raise OptiGPUError(f"ONNX Runtime could not decode {count} tokens: {error}") from error
        self._used += count
        return self._logits

    def close(self) -> None:
        """Gives the buffers back."""
        self._passes.clear()
        self._kept.clear()

    def _bound(self) -> IOBinding:
        binding = self._session.io_binding()
        for name, array in self._kept.items():
            place = (np.float32, array.shape, array.ctypes.data)
            binding.bind_input(f"past_{name}", *_CPU, *place)
            binding.bind_output(f"present_{name}", *_CPU, *place)
        binding.bind_output("logits", *_CPU, np.float32, self._logits.shape, self._logits.ctypes.data)
        return binding


class _Pass:
    """What a pass over `count` tokens of each row reads, besides keys and values."""

    def __init__(self, rows: int, count: int, binding: IOBinding, places: bool) -> None:
        self.binding = binding
        self._tokens = self._input("input_ids", np.zeros((rows, count), np.int64))
        self._ends = self._input("seqlens_k", np.zeros(rows, np.int32))
        self._total = self._input("total_length", np.zeros(1, np.int32))
        self._positions = self._input("positions", np.zeros(count, np.int64)) if places else None
        self._steps = np.arange(count)

    def fill(self, tokens: Ids, used: int) -> None:
        """The next pass appends `tokens` to sequences of `used` tokens."""
        total = used + tokens.shape[1]
        self._tokens[:] = tokens
        self._ends[:] = total - 1
        self._total[0] = total
        if self._positions is not None:
            np.add(self._steps, used, out=self._positions)

    def _input(self, name: str, array: NDArray[np.generic]) -> NDArray[np.generic]:
        self.binding.bind_input(name, *_CPU, array.dtype.type, array.shape, array.ctypes.data)
        return array
