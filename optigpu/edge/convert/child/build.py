"""Builds the INT8 model with TensorFlow, and what the float network answers on held-out inputs."""

import contextlib
import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from .answers import Answers, RefusalError, Request
from .data import PIXELS, Inputs, chosen, image_paths, npz_inputs, random_inputs, require_different, split
from .networks import Network, first_line, keras_file, mobilenet_v2, saved_model, settle_statistics

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
