"""A classifier in LiteRT: a .tflite file with one tensor of images in, and one of scores out.

The file is checked before LiteRT reads it: LiteRT trusts every offset in it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineRuntime, timed_pass, unknown_kernels, weights_of_file
from optigpu.backends.litert import PACKAGE
from optigpu.backends.runtime import Images, Pass
from optigpu.documents.facts import FROM_FILE, ImageFacts, ImageFootprint, NetworkFacts, WeightFacts
from optigpu.documents.manifest import read_manifest
from optigpu.edge.tflite import Model, Tensor, operator_counts, read_tflite
from optigpu.models.held import TFLITE, model_file
from optigpu.models.reference import ModelReference
from optigpu.techniques.base import Notes
from optigpu.vocabulary import SpecError, UnsupportedError, unsupported

QUANTIZED = ("int8", "uint8")
FLOAT = "float32"
Array = NDArray[np.generic]
Floats = NDArray[np.float32]
MANIFEST = "manifest.json"


class LiteRtRuntime(EngineRuntime):
    """An ImageRuntime: a .tflite file, its operators delegated to XNNPACK where XNNPACK has them.

    Images come as float32 [batch, channels, height, width] and are laid out and quantized before what is timed; the
    scores are dequantized after it. They are what the file gives: of most classifiers probabilities.
    """

    engine = "LiteRT"

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model that is no .tflite file of a classifier, or that LiteRT cannot run."""
        self.device, self.seed = order.device, order.seed
        self._source = source = source_of(order.reference)
        side, _, channels = source.network.input
        classes = source.network.classes or source.model.outputs[0].shape[-1]
        self.facts = ImageFacts(source.network.family, channels, side, classes, True, source.network.alpha)
        self._given, self._scores = (
            TensorForm.of(source.model.inputs[0]),
            TensorForm.of(source.model.outputs[0]),
        )
        progress("loading")
        self._load(order.workload.classified_images or 1, order.threads)
        self.notes = Notes()
        self.notes.record(
            dtype=self._given.dtype,
            threads=order.threads,
            versions={PACKAGE: version(PACKAGE)},
            reasons=unknown_kernels("LiteRT does not say which kernels run."),
            tflite_sha256=source.sha256,
            tflite_bytes=source.model.size,
            tflite_operators=sorted({operator.name for operator in source.model.operators}),
            tflite_macs=source.macs,
            tflite_kernels="those of XNNPACK where it has the operator, else those of LiteRT",
        )

    def forward(self, inputs: Images) -> Pass:
        """Its time ends when the most likely class of each image is chosen, as every backend's does."""
        images = self._given.stored(np.ascontiguousarray(inputs.transpose(0, 2, 3, 1)))
        self._interpreter.set_tensor(self._input, images)

        def run() -> Array:
            self._interpreter.invoke()
            scores: Array = self._interpreter.get_tensor(self._output)
            return scores

        return timed_pass(run, self._scores.real)

    def weights(self) -> WeightFacts:
        """The file's hash, which is how devices name it, and the constants that operators read, each once."""
        path, model = self._source.path, self._source.model
        parameters = sum(tensor.elements for tensor in model.tensors if tensor.constant_bytes)
        return weights_of_file(path, self._source.sha256, size=model.parameter_bytes, parameters=parameters)

    def footprint(self) -> ImageFootprint:
        """A pass reads all constants; an operation is a multiplication or an addition."""
        side, channels = self.facts.image_size, self.facts.channels
        parameters, macs = self._source.model.parameter_bytes, self._source.macs
        return ImageFootprint(self.facts, parameters, 2 * macs, channels * side * side)

    def _load(self, batch: int, threads: int) -> None:
        """For one batch of images. Raises UnsupportedError if LiteRT cannot run the file, or not for such a batch."""
        path, fixed = self._source.path, self._source.model.inputs[0].shape
        shape = (batch, *fixed[1:])
        with unsupported(
            (ValueError, RuntimeError),
            lambda why: f"LiteRT cannot run {path.name} for {batch} images: {why}.",
        ):
            self._interpreter = Interpreter(model_path=str(path), num_threads=threads)
            self._input = self._interpreter.get_input_details()[0]["index"]
            self._output = self._interpreter.get_output_details()[0]["index"]
            if shape != fixed:
                self._interpreter.resize_tensor_input(self._input, shape, strict=False)
            self._interpreter.allocate_tensors()


prepared = LiteRtRuntime


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


@dataclass(frozen=True)
class Source:
    """A file, what it holds, and which network it is; `macs` are the multiply-accumulates for one image."""

    path: Path
    sha256: str
    model: Model
    network: NetworkFacts
    macs: int


def source_of(reference: ModelReference) -> Source:
    """The file of a reference such as path:edge/model.tflite.

    Raises UnsupportedError for another kind of model, a damaged file, one that classifies no square images, and one
    that is not what the manifest beside it describes.
    """
    if reference.kind != "path" or not reference.name.endswith(TFLITE):
        raise UnsupportedError(
            f"litert cannot run {reference}: it runs .tflite files, such as `optigpu convert` writes; name one as "
            f"path:FOLDER/model{TFLITE}."
        )
    path = model_file(reference.name)
    try:
        model = read_tflite(path)
        macs = sum(each.macs for each in operator_counts(model))
        _require_classifier(model, path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return Source(path, sha256, model, _network(model, path, sha256), macs)
    except SpecError as error:
        raise UnsupportedError(str(error).replace(str(path), str(reference))) from None


def _require_classifier(model: Model, path: Path) -> None:
    """Raises UnsupportedError unless it takes one tensor of square images and gives one score for each class."""
    inputs, outputs = [tensor.shape for tensor in model.inputs], [tensor.shape for tensor in model.outputs]
    dims = [len(shape) for shape in (*inputs, *outputs)]
    if len(inputs) != 1 or dims != [4, 2] or inputs[0][1] != inputs[0][2]:
        raise UnsupportedError(
            f"{path.name} has inputs {inputs} and outputs {outputs}; classify needs one input of square images "
            "(1, side, side, channels) and one output (1, classes)."
        )


def _network(model: Model, path: Path, sha256: str) -> NetworkFacts:
    """That of the manifest beside the file, where there is one."""
    beside = path.with_name(MANIFEST)
    if not beside.is_file():
        return NetworkFacts(
            family=FROM_FILE, input=model.inputs[0].shape[1:], classes=model.outputs[0].shape[-1]
        )
    manifest = read_manifest(beside)
    if manifest.sha256 != sha256:
        raise UnsupportedError(
            f"{path.name} is not the model of the {MANIFEST} beside it, whose sha256 is {manifest.sha256[:12]}... and "
            f"not {sha256[:12]}...; convert it again, or remove the manifest."
        )
    return NetworkFacts.of_manifest(manifest.model_dump(mode="json"))
