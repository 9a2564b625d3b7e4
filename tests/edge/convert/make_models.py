"""Makes the small networks of these tests; runs in the Python that has TensorFlow: `make_models.py FOLDER`."""

import sys
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers


def tiny() -> keras.Model:
    """16x16x3 to 4 classes; 26,688 MACs, as test_conversion.py counts by hand. Its classes are far apart."""
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, strides=2, padding="same", activation="relu6"),
            layers.DepthwiseConv2D(3, padding="same", activation="relu"),
            layers.Conv2D(16, 1),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, activation="softmax"),
        ]
    )
    model.layers[-1].set_weights([30 * each for each in model.layers[-1].get_weights()])
    return model


def with_layer(*added: layers.Layer) -> keras.Model:
    """A network of one kind of layer behind a convolution."""
    return keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), *added])


def two_inputs() -> keras.Model:
    one, other = keras.Input((8,)), keras.Input((8,))
    return keras.Model([one, other], layers.Dense(2)(layers.Concatenate()([one, other])))


def constant() -> keras.Model:
    """Answers the same to every input, in INT8."""
    bias = keras.initializers.Constant([90.0, 0.0, 0.0])
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, bias_initializer=bias, activation="softmax")])


def weights_of(value: float) -> keras.Model:
    """With one weight of that value."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    kernel, bias = model.get_weights()
    kernel[0, 0] = value
    model.set_weights([kernel, bias])
    return model


def main(folder: Path) -> None:
    keras.utils.set_random_seed(1)
    models = {
        "tiny": tiny(),
        "vector": keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="relu"), layers.Dense(3)]),
        "constant": constant(),
        "dynamic": keras.Sequential(
            [keras.Input((None, None, 3)), layers.Conv2D(4, 3), layers.GlobalMaxPooling2D()]
        ),
        "two_inputs": two_inputs(),
        "whole_numbers": keras.Sequential(
            [keras.Input((4,), dtype="int32"), layers.Embedding(9, 3), layers.Flatten()]
        ),
        "large": keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(2048, 1)]),
        "transposed": with_layer(layers.Conv2DTranspose(2, 3), layers.GlobalAveragePooling2D()),
        "lacking": with_layer(layers.Activation("gelu"), layers.GlobalAveragePooling2D()),
        "floating": with_layer(layers.ELU(), layers.GlobalAveragePooling2D()),
        "bicubic": with_layer(layers.UpSampling2D(interpolation="bicubic"), layers.GlobalAveragePooling2D()),
        "exponential": with_layer(layers.Activation("exponential"), layers.GlobalAveragePooling2D()),
        "not_a_number": weights_of(float("nan")),
        "largest": weights_of(3e38),
        "sequence": keras.Sequential([keras.Input((6, 4)), layers.LSTM(5), layers.Dense(2)]),
    }
    for name, model in models.items():
        model.save(folder / f"{name}.keras")
    models["tiny"].export(folder / "saved", verbose=False)
    (folder / "truncated.keras").write_bytes((folder / "tiny.keras").read_bytes()[:2000])
    (folder / "float.tflite").write_bytes(tf.lite.TFLiteConverter.from_keras_model(models["tiny"]).convert())


main(Path(sys.argv[1]))
