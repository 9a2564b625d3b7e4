"""What workloads and meters ask of a Keras classifier in TensorFlow, and what it is: its shapes, weights and MACs."""

import hashlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path

import numpy as np
import tensorflow as tf

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineRuntime, timed_pass, unknown_kernels, weights_of_file
from optigpu.backends.runtime import Images, Pass
from optigpu.backends.tensorflow import PACKAGES
from optigpu.documents.facts import FROM_FILE, ImageFacts, ImageFootprint, WeightFacts
from optigpu.models.held import KERAS, model_file
from optigpu.techniques.base import Notes, engine_options
from optigpu.vocabulary import UnsupportedError, unsupported

FLOAT = 4


class TensorFlowRuntime(EngineRuntime):
    """An ImageRuntime: the model as one tf.function in float32, with oneDNN where TensorFlow was built with it.

    Images come as float32 [batch, channels, height, width] and are laid out before what is timed.
    """

    engine = "TensorFlow"

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model that is no .keras file of a classifier."""
        self.device, self.seed = order.device, order.seed
        if order.reference.kind != "path" or not order.reference.name.endswith(KERAS):
            raise UnsupportedError(
                f"tensorflow cannot run {order.reference}: it runs Keras models; name one as path:FOLDER/model{KERAS}."
            )
        self._path = model_file(order.reference.name)
        progress("loading")
        model = _loaded(self._path)
        self.facts = facts_of(model, self._path.name)
        self._parameters = sum(prod(weight.shape) for weight in model.weights)
        self._macs = sum(map(_macs, _layers(model)))
        xla = engine_options(order.stack).graph == "xla"
        call = tf.function(lambda images: model(images, training=False), jit_compile=xla)
        shape = (order.workload.classified_images or 1, *model.input_shape[1:])
        progress("compiling")
        self._call = call.get_concrete_function(tf.TensorSpec(shape, tf.float32))
        self.notes = Notes()
        self.notes.record(
            dtype="float32",
            threads=order.threads,
            versions={"tensorflow": tf.__version__, "keras": _version("keras")},
            reasons=unknown_kernels("TensorFlow does not say which kernels run."),
            tensorflow_package=next((name for name in PACKAGES if _version(name) != "unknown"), "unknown"),
            tensorflow_xla=xla,
            tensorflow_build=dict(sorted(tf.sysconfig.get_build_info().items())),
        )

    def forward(self, inputs: Images) -> Pass:
        """Its time ends when the most likely class of each image is chosen, as every backend's does."""
        images = tf.constant(np.ascontiguousarray(inputs.transpose(0, 2, 3, 1)))
        return timed_pass(lambda: self._call(images).numpy())

    def weights(self) -> WeightFacts:
        """The file's hash; the bytes are those of the variables, all float32."""
        found, count = hashlib.sha256(self._path.read_bytes()).hexdigest(), self._parameters
        return weights_of_file(self._path, found, size=FLOAT * count, parameters=count)

    def footprint(self) -> ImageFootprint:
        """A pass reads all variables; an operation is a multiplication or an addition."""
        side, channels = self.facts.image_size, self.facts.channels
        pixels = channels * side * side
        return ImageFootprint(self.facts, FLOAT * self._parameters, 2 * self._macs, pixels)


prepared = TensorFlowRuntime


def _loaded(path: Path) -> "tf.keras.Model":
    """Without any code that a file may bring."""
    kinds = (ValueError, OSError, KeyError, TypeError)
    with unsupported(kinds, lambda why: f"TensorFlow cannot load {path.name} ({why}); name another file."):
        return tf.keras.models.load_model(path, compile=False, safe_mode=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def facts_of(model: "tf.keras.Model", name: str) -> ImageFacts:
    """Raises UnsupportedError unless it takes square images and gives one score for each class."""
    given, scores = model.input_shape, model.output_shape
    fits = isinstance(given, tuple) and isinstance(scores, tuple) and (len(given), len(scores)) == (4, 2)
    if not fits or given[1] != given[2] or None in (*given[1:], scores[1]):
        raise UnsupportedError(
            f"{name} takes {given} and gives {scores}; classify needs square images of a fixed size (batch, side, "
            "side, channels) and one score for each class (batch, classes)."
        )
    return ImageFacts(FROM_FILE, given[3], given[1], scores[1], True)


def _layers(model: "tf.keras.Model") -> list["tf.keras.layers.Layer"]:
    """All layers, those of models within it as well."""
    found = []
    for layer in model.layers:
        found += _layers(layer) if isinstance(layer, tf.keras.Model) else [layer]
    return found


def _macs(layer: "tf.keras.layers.Layer") -> int:
    """Of one image: each element of the output times what is summed for it."""
    kinds = tf.keras.layers
    if not isinstance(layer, kinds.Conv2D | kinds.DepthwiseConv2D | kinds.Dense):
        return 0
    outputs = prod(layer.output.shape[1:])
    if isinstance(layer, kinds.DepthwiseConv2D):
        return int(outputs * prod(layer.kernel_size))
    if isinstance(layer, kinds.Conv2D):
        inputs = layer.input.shape[-1] // layer.groups
        return int(outputs * prod(layer.kernel_size) * inputs)
    return int(outputs * layer.input.shape[-1])
