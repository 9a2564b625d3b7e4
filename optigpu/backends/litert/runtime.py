"""A classifier in LiteRT: a .tflite file with one tensor of images in, and one of scores out.

The file is checked before LiteRT reads it: LiteRT trusts every offset in it.
"""

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

from optigpu.backends.base import Order
from optigpu.backends.litert import PACKAGE
from optigpu.backends.runtime import Images, MemoryPeaks, Pass, Profile
from optigpu.documents.facts import FROM_FILE, NetworkFacts, WeightFacts
from optigpu.documents.manifest import ModelManifest, read_manifest
from optigpu.documents.shapes import ImageFacts, ImageFootprint
from optigpu.edge.macs import operator_counts
from optigpu.edge.tflite import Model, Tensor, read_tflite
from optigpu.models.held import TFLITE, model_file
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes
from optigpu.vocabulary import SpecError, UnsupportedError

NOT_SAID = "LiteRT does not say which kernels run."
ON_CPU = "LiteRT runs on the CPU here, which has no memory of an accelerator."
NO_REVISION = "A file has no revision; the weight hash identifies it."
QUANTIZED = ("int8", "uint8")
FLOAT = "float32"
Array = NDArray[np.generic]
Floats = NDArray[np.float32]
MANIFEST = "manifest.json"


class LiteRtRuntime:
    """An ImageRuntime: a .tflite file, its operators delegated to XNNPACK where XNNPACK has them.

    Images come as float32 [batch, channels, height, width] and are laid out and quantized before what is timed; the
    scores are dequantized after it. They are what the file gives: of most classifiers probabilities.
    """

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model that is no .tflite file of a classifier, or that LiteRT cannot run."""
        self.device, self.seed = order.device, order.seed
        self.notes = Notes()
        self._source = source_of(order.model)
        self.facts = self._source.facts
        self._given = TensorForm.of(self._source.model.inputs[0])
        self._scores = TensorForm.of(self._source.model.outputs[0])
        progress("loading")
        batch = order.workload.classified_images or 1
        self._model = LiteRtModel(self._source.path, self._source.model, batch, order.threads)
        self._record(order)

    def forward(self, inputs: Images) -> Pass:
        """Its time ends when the most likely class of each image is chosen, as every backend's does."""
        self._model.fill(self._given.stored(np.ascontiguousarray(inputs.transpose(0, 2, 3, 1))))
        started = time.perf_counter_ns()
        scores = self._model.run()
        chosen = scores.argmax(axis=-1)
        seconds = (time.perf_counter_ns() - started) / 1e9
        return Pass(self._scores.real(scores), chosen, seconds)

    def observe(self, inputs: Images) -> None:
        """LiteRT does not name the kernels that it runs."""

    def compute_exactly(self) -> None:
        """Nothing: the file decides how exactly it computes, and no reference is made of it."""

    def weights(self) -> WeightFacts:
        """The file's hash, which is how devices name it, and the bytes of its constants."""
        source = self._source
        return WeightFacts(
            bytes=source.model.parameter_bytes,
            parameters=source.parameters,
            hash=source.sha256,
            hash_of="files",
            files={source.path.name: source.sha256},
            reasons={"revision": NO_REVISION},
        )

    def footprint(self) -> ImageFootprint:
        """A pass reads all constants; an operation is a multiplication or an addition."""
        side, channels = self.facts.image_size, self.facts.channels
        parameters, macs = self._source.model.parameter_bytes, self._source.macs
        return ImageFootprint(self.facts, parameters, 2 * macs, channels * side * side)

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """There is no accelerator; the host's memory is the meter's own affair."""
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes"), ON_CPU))

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """LiteRT's profiler is a program of its own."""
        raise UnsupportedError("LiteRT has no profiler here; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Nobody watches a CPU from outside."""
        return nullcontext()

    def _record(self, order: Order) -> None:
        model = self._source.model
        kinds = sorted({operator.name for operator in model.operators})
        self.notes.record(
            dtype=self._given.dtype,
            threads=order.threads,
            versions={PACKAGE: version(PACKAGE)},
            reasons=dict.fromkeys(("attn_implementation", "attention_kernels"), NOT_SAID),
            tflite_sha256=self._source.sha256,
            tflite_bytes=model.size,
            tflite_operators=kinds,
            tflite_macs=self._source.macs,
            tflite_kernels="those of XNNPACK where it has the operator, else those of LiteRT",
        )


@dataclass(frozen=True)
class TensorForm:
    """How a tensor holds numbers: real = scale * (stored - zero_point), or as they are in float32."""

    dtype: str
    scale: float = 1.0
    zero_point: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Raises UnsupportedError for other numbers, and for several scales."""
        if tensor.dtype == FLOAT:
            return cls(FLOAT)
        if tensor.dtype not in QUANTIZED or len(tensor.scales) != 1:
            raise UnsupportedError(
                f"The tensor {tensor.name} holds {tensor.dtype} with {len(tensor.scales)} scales; litert runs models "
                f"whose input and output are {FLOAT}, or {' or '.join(QUANTIZED)} with one scale."
            )
        return cls(tensor.dtype, tensor.scales[0], tensor.zero_points[0])

    def stored(self, values: Floats) -> Array:
        """Real numbers as the tensor holds them, rounded to the nearest; too large ones become the largest."""
        if self.dtype == FLOAT:
            return np.ascontiguousarray(values)
        limits = np.iinfo(self.dtype)
        levels = np.rint(values / self.scale) + self.zero_point
        held: Array = np.clip(levels, limits.min, limits.max).astype(self.dtype)
        return held

    def real(self, stored: Array) -> Floats:
        """The numbers that the tensor stands for."""
        if self.dtype == FLOAT:
            return np.asarray(stored, np.float32)
        levels = stored.astype(np.int32) - self.zero_point
        return np.asarray(levels * self.scale, np.float32)


class LiteRtModel:
    """The interpreter of a file, for one batch of images [batch, height, width, channels]."""

    def __init__(self, path: Path, model: Model, batch: int, threads: int) -> None:
        """Raises UnsupportedError if LiteRT cannot run the file, or not for such a batch."""
        shape = (batch, *model.inputs[0].shape[1:])
        try:
            self._interpreter = Interpreter(model_path=str(path), num_threads=threads)
            self._input = self._interpreter.get_input_details()[0]["index"]
            self._output = self._interpreter.get_output_details()[0]["index"]
            if shape != model.inputs[0].shape:
                self._interpreter.resize_tensor_input(self._input, shape, strict=False)
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            why = str(error).strip().splitlines()[0].rstrip(".")
            raise UnsupportedError(f"LiteRT cannot run {path.name} for {batch} images: {why}.") from error

    def fill(self, images: Array) -> None:
        """Copies the images, as the tensor holds them, into the interpreter."""
        self._interpreter.set_tensor(self._input, images)

    def run(self) -> Array:
        """One pass: the scores as they are stored, [batch, classes]."""
        self._interpreter.invoke()
        scores: Array = self._interpreter.get_tensor(self._output)
        return scores


@dataclass(frozen=True)
class Source:
    """A file, what it holds, and which network it is; `macs` are the multiply-accumulates for one image."""

    path: Path
    sha256: str
    model: Model
    network: NetworkFacts
    macs: int

    @property
    def parameters(self) -> int:
        """The constants that operators read, each once."""
        return sum(tensor.elements for tensor in self.model.tensors if tensor.constant_bytes)

    @property
    def facts(self) -> ImageFacts:
        """The shapes of its input; a file is for one size."""
        side, _, channels = self.network.input
        classes = self.network.classes or self.model.outputs[0].shape[-1]
        return ImageFacts(self.network.family, channels, side, classes, True, self.network.alpha)


def source_of(reference: str | None) -> Source:
    """The file of a reference such as path:edge/model.tflite.

    Raises UnsupportedError for another kind of model, a damaged file, one that classifies no square images, and one
    that is not what the manifest beside it describes.
    """
    parsed = parse_reference(str(reference))
    if parsed.kind != "path" or not parsed.name.endswith(TFLITE):
        raise UnsupportedError(
            f"litert cannot run {parsed}: it runs .tflite files, such as `optigpu convert` writes; name one as "
            f"path:FOLDER/model{TFLITE}."
        )
    path = model_file(parsed.name)
    try:
        model = read_tflite(path)
        macs = sum(each.macs for each in operator_counts(model))
        _require_classifier(model, path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest = _manifest(path, sha256)
    except SpecError as error:
        raise UnsupportedError(str(error).replace(str(path), str(parsed))) from None
    return Source(path, sha256, model, _network(model, manifest), macs)


def _require_classifier(model: Model, path: Path) -> None:
    """Raises UnsupportedError unless it takes one tensor of square images and gives one score for each class."""
    shapes = [tensor.shape for tensor in (*model.inputs, *model.outputs)]
    dims = [len(shape) for shape in shapes]
    if (len(model.inputs), len(model.outputs)) != (1, 1) or dims != [4, 2] or shapes[0][1] != shapes[0][2]:
        raise UnsupportedError(
            f"{path.name} has inputs {[tensor.shape for tensor in model.inputs]} and outputs "
            f"{[tensor.shape for tensor in model.outputs]}; classify needs one input of square images "
            "(1, side, side, channels) and one output (1, classes)."
        )


def _manifest(path: Path, sha256: str) -> ModelManifest | None:
    """The manifest beside the file; None if there is none."""
    beside = path.with_name(MANIFEST)
    if not beside.is_file():
        return None
    manifest = read_manifest(beside)
    if manifest.sha256 != sha256:
        raise UnsupportedError(
            f"{path.name} is not the model of the {MANIFEST} beside it, whose sha256 is {manifest.sha256[:12]}... and "
            f"not {sha256[:12]}...; convert it again, or remove the manifest."
        )
    return manifest


def _network(model: Model, manifest: ModelManifest | None) -> NetworkFacts:
    if manifest is not None:
        return NetworkFacts.of_manifest(manifest.model_dump(mode="json"))
    return NetworkFacts(family=FROM_FILE, input=model.inputs[0].shape[1:], classes=model.outputs[0].shape[-1])
