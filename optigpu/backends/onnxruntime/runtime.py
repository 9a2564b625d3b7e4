"""An order as a runtime: the graph is written if it is not kept already, and loaded.

A classifier's graph, and that of a prompt, is run in single passes by ONNX Runtime's CPU provider.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import GraphOptimizationLevel, InferenceSession, IOBinding, SessionOptions

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, model_arguments, weights_of, whole
from optigpu.backends.engine import EngineRuntime, SteppedRuntime, timed_pass, unknown_kernels
from optigpu.backends.onnxruntime import (
    MODEL,
    Contents,
    OnnxRuntimeBackend,
    format_of,
    graph_level_of,
    parts_of,
)
from optigpu.backends.runtime import Ids, Images, Logits, Pass, Runtime
from optigpu.documents.facts import Footprint, ImageFacts, ImageFootprint, ModelFacts, WeightFacts
from optigpu.models.described import decoder_facts, image_facts, known_facts
from optigpu.techniques.base import Notes, engine_options
from optigpu.vocabulary import OptiGPUError, Task, UnsupportedError

NAME = "ONNX Runtime"
PACKAGES = OnnxRuntimeBackend.packages
_WRITERS = ("convert", "graphs", "__init__")
CONVERTER = Converter(
    engine="onnxruntime",
    program="optigpu.backends.onnxruntime.convert",
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
Inputs = TypeVar("Inputs", Ids, Images)


def prepared(order: Order, progress: Callable[[str], None]) -> Runtime:
    """Raises UnsupportedError for a model that cannot be written as ONNX, OptiGPUError when writing fails."""
    if order.workload.task is Task.IMAGES:
        return _classifier(order, progress)
    try:
        parts_of(decoder_facts(order.reference).family)
    except UnsupportedError as error:
        raise UnsupportedError(f"onnxruntime cannot run {order.reference}: {error}") from error
    form = format_of(order.stack).name
    folder = CONVERTER.made(order, form, (*model_arguments(order), "--format", form), progress)
    contents, session = _loaded(folder, order, progress)
    footprint = contents.footprint
    assert isinstance(footprint, Footprint), "the converter was told to write a decoder"
    facts = footprint.facts
    notes, weights = _notes(order, contents), _weights(order, contents)
    notes.record(
        kv_cache="past_present_share_buffer",
        kv_cache_dtype="float32",
        kv_cache_bytes_per_token=2 * facts.layers * facts.kv_heads * facts.head_size * 4,
        decode_loop=NAME,
        decode_operator="GroupQueryAttention",
    )

    def steps(rows: int, length: int) -> DecodingSteps:
        return DecodingSteps(session, facts, rows, length)

    if order.workload.task is Task.PREFILL:
        return OnnxPassRuntime[Ids](order, _Prompts(steps), weights, footprint, notes)
    return SteppedRuntime(
        order, notes, engine=NAME, facts=facts, steps=steps, weights=weights, footprint=footprint
    )


def _classifier(order: Order, progress: Callable[[str], None]) -> Runtime:
    known = known_facts(order.reference)
    facts = known if isinstance(known, ImageFacts) else image_facts(order.reference)
    size = order.workload.image_side or facts.image_size
    images = engine_options(order.stack).calibrated_on or 0
    arguments = ("--image-size", str(size), "--calibration-images", str(images))
    folder = CONVERTER.made(order, f"images-{size}-{images}", (*model_arguments(order), *arguments), progress)
    contents, session = _loaded(folder, order, progress)
    footprint = contents.footprint
    assert isinstance(footprint, ImageFootprint), "the converter was told to write a classifier"

    def run(images: Images) -> Logits:
        logits: Logits = session.run(None, {"images": images})[0]
        return logits

    weights = _weights(order, contents)
    return OnnxPassRuntime[Images](order, run, weights, footprint, _notes(order, contents))


class _Prompts:
    """Passes over whole prompts, each into empty keys and values."""

    def __init__(self, steps: "Callable[[int, int], DecodingSteps]") -> None:
        self._made = steps
        self._steps: DecodingSteps | None = None

    def __call__(self, prompts: Ids) -> Logits:
        """Logits after each prompt, [rows, vocabulary]."""
        steps = self._steps
        if steps is None or (steps.rows, steps.length) != prompts.shape:
            steps = self._steps = self._made(*prompts.shape)
        steps.begin()
        return steps.forward(prompts)


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
        reasons=unknown_kernels("ONNX Runtime does not say which kernels run."),
        onnx_tensor_types=contents.tensor_types,
        onnx_graph_level=graph_level_of(order.stack),
        onnxruntime_build=onnxruntime.get_build_info(),
        onnxruntime_providers=[PROVIDER],
        onnxruntime_spinning="the engine's default: threads spin while they wait",
    )
    return notes


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


class OnnxPassRuntime(EngineRuntime, Generic[Inputs]):
    """A PassRuntime on a CPU. `run` makes logits of inputs; they are valid until the next call."""

    engine = NAME

    def __init__(
        self,
        order: Order,
        run: Callable[[Inputs], Logits],
        weights: WeightFacts,
        footprint: Footprint | ImageFootprint,
        notes: Notes,
    ) -> None:
        self.device, self.seed, self.notes = order.device, order.seed, notes
        self.facts = footprint.facts
        self._run: Callable[[Inputs], Logits] = run
        self._weights, self._footprint = weights, footprint

    def forward(self, inputs: Inputs) -> Pass:
        """Its time ends when the most likely token or class of each row is chosen, as every backend's does."""
        ready = np.ascontiguousarray(inputs)
        return timed_pass(lambda: self._run(ready))


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

        Raises OptiGPUError when a token is none of the vocabulary.
        """
        rows, count = tokens.shape
        known = self._passes.get(count)
        if known is None:
            binding = self._session.io_binding()
            for name, array in self._kept.items():
                place = (np.float32, array.shape, array.ctypes.data)
                binding.bind_input(f"past_{name}", *_CPU, *place)
                binding.bind_output(f"present_{name}", *_CPU, *place)
            binding.bind_output("logits", *_CPU, np.float32, self._logits.shape, self._logits.ctypes.data)
            known = self._passes[count] = _Pass(rows, count, binding, self._places)
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
