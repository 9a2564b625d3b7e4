"""`python make_tiny_models.py FOLDER`, in the edge Python: two small int8 models, inputs, and what LiteRT answers.

ic01.tflite is a convolution over 8 x 8 x 3 with four classes, ad01.tflite an autoencoder of 32 numbers.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter, OpResolverType

SAMPLES = 6


def main(folder: Path) -> None:
    random = np.random.default_rng(4)
    tf.keras.utils.set_random_seed(4)
    pictures = random.integers(0, 256, (SAMPLES, 8, 8, 3), dtype=np.uint8)
    layers = tf.keras.layers
    convolution = tf.keras.Sequential(
        [
            layers.Input((8, 8, 3), batch_size=1),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(4, activation="softmax"),
        ]
    )
    write(folder / "ic01.tflite", convolution, pictures.astype(np.float32) / 255)
    quantized = (pictures.astype(np.int16) - 128).astype(np.int8)
    results = [answer(folder / "ic01.tflite", each) for each in quantized]
    np.savez(
        folder / "ic01.npz",
        inputs=pictures,
        labels=np.array([result.argmax() for result in results]),
        results=np.array(results),
    )
    sounds = random.normal(size=(SAMPLES, 32)).astype(np.float32)
    sounds[SAMPLES // 2 :] *= 4  # the anomalies, which it can repeat less well
    autoencoder = tf.keras.Sequential(
        [layers.Input((32,), batch_size=1), layers.Dense(4, activation="relu"), layers.Dense(32)]
    )
    write(folder / "ad01.tflite", autoencoder, sounds)
    labels = np.arange(SAMPLES) >= SAMPLES // 2
    np.savez(folder / "ad01.npz", inputs=sounds, labels=labels.astype(np.int64))


def write(path: Path, model: Any, samples: np.ndarray) -> None:
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([each[None]] for each in samples)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    path.write_bytes(converter.convert())


def answer(path: Path, sample: np.ndarray) -> np.ndarray:
    """What LiteRT's reference kernels answer, as numbers."""
    interpreter = Interpreter(str(path), experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], sample[None])
    interpreter.invoke()
    details = interpreter.get_output_details()[0]
    scale, zero_point = details["quantization"]
    output: np.ndarray = (interpreter.get_tensor(details["index"])[0].astype(np.int16) - zero_point) * scale
    return output


if __name__ == "__main__":
    main(Path(sys.argv[1]))
