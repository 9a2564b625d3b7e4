"""What a Keras model of a classifier is: its shapes, its weights, and the multiply-accumulates of an image."""

from dataclasses import dataclass
from math import prod

import tensorflow as tf

from optigpu.vocabulary import UnsupportedError


@dataclass(frozen=True)
class Network:
    """`input` is [height, width, channels]; `macs` are the multiply-accumulates for one image."""

    input: tuple[int, int, int]
    classes: int
    parameters: int
    macs: int


def network_of(model: "tf.keras.Model", name: str) -> Network:
    """Raises UnsupportedError unless it takes square images and gives one score for each class."""
    given, scores = model.input_shape, model.output_shape
    fits = isinstance(given, tuple) and isinstance(scores, tuple) and (len(given), len(scores)) == (4, 2)
    if not fits or given[1] != given[2] or None in (*given[1:], scores[1]):
        raise UnsupportedError(
            f"{name} takes {given} and gives {scores}; classify needs square images of a fixed size (batch, side, "
            "side, channels) and one score for each class (batch, classes)."
        )
    parameters = sum(prod(weight.shape) for weight in model.weights)
    return Network(tuple(given[1:]), scores[1], parameters, sum(map(_macs, _layers(model))))


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
