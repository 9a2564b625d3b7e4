"""Builds the INT8 model with TensorFlow, and what the float network answers on held-out inputs.

The network to convert is Keras's MobileNetV2, a .keras file or a SavedModel, as one function of one sample.
"""

import contextlib
import re
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .answers import Answers, RefusalError, Request
from .data import (
    PIXELS,
    Inputs,
    chosen,
    image_paths,
    npz_inputs,
    random_inputs,
    require_different,
    split,
)

MOMENTUM = 0.8
"""Of BatchNorm while random weights get their statistics. Keras's 0.999 would need thousands of steps."""
STEPS, STEP_SAMPLES = 24, 16
SPREAD = 4.0
"""Standard deviation of the logits of random weights. Else 1,000 classes have 0.001 each, which INT8 takes for 0."""

LOOPS = ("While", "StatelessWhile")

Outputs = Inputs


class Network:
    """A float network: its input's shape without the batch, and what it computes. `keep` is what owns the variables,
    `model` the Keras model if it is one."""

    def __init__(
        self, call: Callable[[Any], Any], shape: tuple[int, ...], keep: Any, model: Any = None
    ) -> None:
        self.shape, self.keep, self.model = shape, keep, model
        self.function = tf.function(call).get_concrete_function(tf.TensorSpec((1, *shape), tf.float32))

    def outputs(self, inputs: Inputs) -> Outputs:
        """(samples, *output), one sample at a time."""
        found = [_only(self.function(tf.constant(inputs[n : n + 1]))) for n in range(len(inputs))]
        return np.concatenate([np.asarray(each, dtype=np.float32) for each in found])

    def require_no_loop(self) -> None:
        """Raises RefusalError for a graph with a loop, in which TensorFlow's quantizer dies."""
        graph = self.function.graph.as_graph_def()
        nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
        if any(node.op in LOOPS for node in nodes):
            raise RefusalError(
                "The network has a loop, as recurrent layers (LSTM, GRU) have, and TensorFlow cannot convert loops to "
                "INT8; build these layers with unroll=True, or replace them."
            )

    def require_finite(self, outputs: Outputs) -> None:
        """Raises RefusalError where an output is NaN or infinite, and names the first weights that are."""
        if np.isfinite(outputs).all():
            return
        wrong = [each.name for each in self.function.variables if not np.isfinite(each.numpy()).all()]
        where = f"its weights {wrong[0]} do too" if wrong else "its weights are too large for the data"
        raise RefusalError(
            f"The network's outputs hold NaN or infinity, and {where}; train it anew, or convert another checkpoint."
        )


def mobilenet_v2(request: Request) -> Network:
    """Keras's MobileNetV2; `weights` are random, or ImageNet's, which Keras downloads."""
    side, weights = int(str(request["side"])), str(request["weights"])
    try:
        model = keras.applications.MobileNetV2(
            input_shape=(side, side, 3),
            alpha=float(str(request["alpha"])),
            weights=None if weights == "random" else weights,
            classes=int(str(request["classes"])),
        )
    except Exception as error:  # a download that failed, a shape that Keras has no weights for
        raise RefusalError(f"Keras cannot make this MobileNetV2: {first_line(error)}") from None
    return _of_keras(model)


def keras_file(path: Path) -> Network:
    """A .keras file, without what runs code of its own."""
    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        raise RefusalError(
            f"{path} cannot be read as a Keras model: {first_line(error)}", wrong=True
        ) from None
    return _of_keras(model)


def saved_model(folder: Path) -> Network:
    """The default signature of a SavedModel."""
    try:
        loaded = tf.saved_model.load(str(folder))
    except Exception as error:
        raise RefusalError(
            f"{folder} cannot be read as a SavedModel: {first_line(error)}", wrong=True
        ) from None
    signature = loaded.signatures.get("serving_default")
    if signature is None:
        raise RefusalError(f"{folder} has no signature serving_default; save the model with one.", wrong=True)
    specs = signature.structured_input_signature[1]
    _check_one("inputs", len(specs))
    _check_one("outputs", len(signature.structured_outputs))
    ((name, spec),) = specs.items()
    _check_floats(spec.dtype.name)
    shape = _sample_shape(spec.shape.as_list() if spec.shape.rank is not None else None)
    return Network(lambda sample: _only(signature(**{name: sample})), shape, loaded)


def settle_statistics(network: Network, inputs: Inputs) -> None:
    """Gives random weights of MobileNetV2 the statistics of the data: without, all outputs are alike."""
    for layer in network.model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = MOMENTUM
    for step in range(STEPS):
        start = step * STEP_SAMPLES % len(inputs)
        batch = np.concatenate([inputs[start:], inputs])[:STEP_SAMPLES]
        network.model(batch, training=True)
    # Centres and scales the head, so that its answers differ between classes and between inputs.
    body, head = keras.Model(network.model.input, network.model.layers[-2].output), network.model.layers[-1]
    features = np.concatenate([body(inputs[n : n + 1], training=False) for n in range(len(inputs))])
    kernel = head.get_weights()[0]
    logits = features @ kernel
    mean = logits.mean(axis=0)
    factor = SPREAD / max(float((logits - mean).std()), 1e-6)
    head.set_weights([kernel * factor, -mean * factor])


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    text = text if len(text) <= 300 else text[:297] + "..."
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _of_keras(model: Any) -> Network:
    if not hasattr(model, "inputs") or not model.inputs:
        raise RefusalError(
            "The Keras model has no input yet; build it with an Input layer before you save it.", wrong=True
        )
    _check_one("inputs", len(model.inputs))
    _check_one("outputs", len(model.outputs))
    _check_floats(str(model.inputs[0].dtype))
    shape = _sample_shape(list(model.inputs[0].shape))
    return Network(lambda sample: _only(model(sample, training=False)), shape, model, model)


def _sample_shape(shape: list[int | None] | None) -> tuple[int, ...]:
    """The shape of one sample; the batch may be free or 1."""
    if shape is None or len(shape) < 2 or any(each is None for each in shape[1:]):
        raise RefusalError(
            f"The input's shape {shape} is dynamic; give each dimension but the batch a number before you convert."
        )
    if shape[0] not in (None, 1):
        raise RefusalError(f"The input's shape {shape} is not one sample; build the model with a batch of 1.")
    return tuple(int(each) for each in shape[1:] if each is not None)


def _check_one(what: str, count: int) -> None:
    if count != 1:
        raise RefusalError(f"The network has {count} {what}; the device agent runs models with one of each.")


def _check_floats(dtype: str) -> None:
    if dtype != "float32":
        raise RefusalError(
            f"The network takes {dtype}; build it with a float32 input, which is then quantized."
        )


def _only(found: Any) -> Any:
    """The one tensor of a call's answer, which may be in a dict or a list."""
    if isinstance(found, dict):
        return next(iter(found.values()))
    return found[0] if isinstance(found, list | tuple) else found


PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "numpy")
_OPERATORS = re.compile(r"\btf(?:l)?\.(\w+)")


def build(request: Request, answers: Answers) -> Request:
    """Writes model.tflite and held_out.npz (inputs, outputs) into the request's folder."""
    folder, seed = Path(str(request["folder"])), int(str(request["seed"]))
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()
    answers.doing("building the network")
    if request["family"] == "mobilenet_v2":
        network = mobilenet_v2(request)
    else:
        path = Path(str(request["path"]))
        network = saved_model(path) if path.is_dir() else keras_file(path)
    network.require_no_loop()
    answers.doing("reading the data")
    random = np.random.default_rng(seed)
    inputs = _inputs(request, network.shape, random)
    require_different(inputs)
    calibration, held_out = split(inputs, int(str(request["samples"])), random)
    if request["weights"] == "random" and request["family"] != "file":
        settle_statistics(network, calibration)
    outputs = network.outputs(held_out)
    network.require_finite(outputs)
    answers.doing(f"quantizing with {len(calibration)} samples")
    (folder / "model.tflite").write_bytes(_quantized(network, calibration))
    np.savez(folder / "held_out.npz", inputs=held_out, outputs=outputs)
    tools = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            tools[name] = version(name)
    return {
        "input": list(network.shape),
        "output": list(outputs.shape[1:]),
        "calibrated": len(calibration),
        "tools": tools,
    }


def _inputs(request: Request, shape: tuple[int, ...], random: np.random.Generator) -> Inputs:
    kind, most = request["data"], int(str(request["samples"]))
    pixels = str(request["pixels"])
    if kind == "npz":
        return npz_inputs(Path(str(request["data_path"])), shape)
    if kind == "random":
        return random_inputs(most + max(1, most // 4), shape, pixels, random)
    paths = image_paths(Path(str(request["data_path"])))
    return _images([paths[number] for number in chosen(len(paths), most, random)], shape, pixels)


def _images(paths: list[Path], shape: tuple[int, ...], pixels: str) -> Inputs:
    """The images in the network's size; those that cannot be read are an error that names the first."""
    if len(shape) != 3 or shape[2] not in (1, 3):
        raise RefusalError(
            f"The network's input {list(shape)} is no image; give its data as an .npz file.", wrong=True
        )
    height, width, channels = shape
    factor, offset = PIXELS[pixels]
    made = []
    for path in paths:
        try:
            pixels_of = tf.io.decode_image(
                tf.io.read_file(str(path)), channels=channels, expand_animations=False
            )
            resized = tf.image.resize(pixels_of, (height, width), antialias=True)
        except (tf.errors.OpError, ValueError) as error:
            raise RefusalError(
                f"{path} cannot be read as an image: {first_line(error)}", wrong=True
            ) from None
        made.append(np.clip(resized.numpy(), 0, 255) * factor + offset)
    return np.stack(made).astype(np.float32)


def _quantized(network: Network, calibration: Inputs) -> bytes:
    """Full INT8, with int8 input and output, and no operator that is not."""
    converter = tf.lite.TFLiteConverter.from_concrete_functions([network.function], network.keep)
    converter.experimental_lower_to_saved_model = False  # variables become constants
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([calibration[n : n + 1]] for n in range(len(calibration)))
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: bytes = converter.convert()
    except Exception as error:  # the converter raises what its C++ part says, of many types
        raise RefusalError(_why_not(error)) from None
    return made


def _why_not(error: Exception) -> str:
    """One sentence from the converter's pages of output, with the operators that it names."""
    named = dict.fromkeys(name for name in _OPERATORS.findall(str(error)) if name[0].isupper())
    if named:
        return (
            f"TensorFlow cannot convert the operator {', '.join(list(named)[:6])} to INT8; replace it by one that "
            "TensorFlow Lite quantizes."
        )
    return f"TensorFlow cannot convert the network to INT8: {first_line(error)}"
