"""What a model must be to run on a microcontroller: INT8 throughout, shapes that are known, operators that it has. And
the file `golden.bin`: inputs that a device is given, and the outputs that it must reproduce bit for bit. `OGLD`, then
three little-endian numbers of 32 bits (count, bytes of an input, bytes of an output), then for each golden input its
bytes and those of its output."""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.manifest import (
    LARGEST_OUTPUT,
    LARGEST_SCALE,
    LARGEST_TENSOR,
    MOST_GOLDEN,
    Agreement,
    Golden,
    TensorFormat,
)
from optigpu.edge.tflite import FLOATS, Model, Operator, Tensor, macs_of, operators
from optigpu.vocabulary import SpecError, UnsupportedError

DYNAMIC = -1
BETWEEN = ("DEQUANTIZE", "QUANTIZE")
"""They stand around a floating-point operator, and are not why there is one."""


def check_model(model: Model, *, allow_unaccelerated: bool = False) -> None:
    """Raises UnsupportedError, in one sentence that says what to do, for the first thing that cannot be."""
    if not model.operators:
        raise UnsupportedError("The model has no operators; convert a network that computes something.")
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise UnsupportedError(
            f"The model has {len(model.inputs)} inputs and {len(model.outputs)} outputs; "
            "the device agent runs models with one of each."
        )
    _check_shapes(model)
    _check_integers(model)
    _check_runs(model)
    if allow_unaccelerated:
        return
    # What multiplies without ESP-NN runs some forty times slower than what ESP-NN has.
    fast = operators().esp_nn.operators
    if slow := _names(each for each in model.operators if each.name not in fast and macs_of(each)):
        raise UnsupportedError(
            f"ESP-NN lacks the operator {_listed(slow)}, which would run slowly on the device; replace it, "
            "or accept that with --allow-unaccelerated."
        )


def format_of(tensor: Tensor) -> TensorFormat:
    """The input or output of a checked model as a manifest describes it."""
    return TensorFormat(
        shape=tensor.shape, dtype="int8", scale=tensor.scales[0], zero_point=tensor.zero_points[0]
    )


def _check_shapes(model: Model) -> None:
    for what, tensor in (("input", model.inputs[0]), ("output", model.outputs[0])):
        if DYNAMIC in tensor.signature:
            raise UnsupportedError(
                f"The {what}'s shape {list(tensor.signature)} is dynamic; give each dimension a number "
                "before you convert."
            )
        if not tensor.shape or tensor.shape[0] != 1 or tensor.elements < 1:
            raise UnsupportedError(
                f"The {what}'s shape {list(tensor.shape)} is not one sample; build the model with a batch of 1."
            )
    if model.outputs[0].elements > LARGEST_OUTPUT:
        raise UnsupportedError(
            f"The output has {model.outputs[0].elements:,} numbers, and golden vectors of at most {LARGEST_OUTPUT:,} "
            "are kept; convert a network with a smaller output."
        )
    if dynamic := _names(
        operator
        for operator in model.operators
        if any(DYNAMIC in each.signature for each in operator.outputs)
    ):
        raise UnsupportedError(
            f"The shapes of what {_listed(dynamic)} computes are dynamic, and TFLite Micro plans its memory "
            "beforehand; replace the operator by one with a fixed shape."
        )


def _check_integers(model: Model) -> None:
    floating = _names(
        operator
        for operator in model.operators
        if any(each.dtype in FLOATS for each in (*filter(None, operator.inputs), *operator.outputs))
    )
    if floating:
        named = tuple(name for name in floating if name not in BETWEEN) or floating
        raise UnsupportedError(
            f"The model has floating-point operators left: {_listed(named)}. Replace them by operators that "
            "TensorFlow Lite quantizes, and convert with int8 input and output."
        )
    for what, tensor in (("input", model.inputs[0]), ("output", model.outputs[0])):
        if tensor.dtype != "int8" or len(tensor.scales) != 1 or len(tensor.zero_points) != 1:
            raise UnsupportedError(
                f"The {what} is {tensor.dtype} and must be int8 with one scale; convert with full INT8 quantization."
            )

    for what, tensor in (("input", model.inputs[0]), ("output", model.outputs[0])):
        if not 0 < tensor.scales[0] <= LARGEST_SCALE:
            raise UnsupportedError(
                f"The {what}'s scale is {tensor.scales[0]:g}, and the largest is {LARGEST_SCALE:g}; scale the data and "
                "the weights so that their numbers are near 1."
            )


def _check_runs(model: Model) -> None:
    known = operators().tflite_micro.operators
    if lacking := _names(each for each in model.operators if each.name not in known):
        wanted = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD")
        if any("LU" in name or "TANH" in name for name in lacking):
            wanted = ("RELU", "RELU6", "HARD_SWISH", "LOGISTIC")
        close = ", ".join(name for name in wanted if name in known)
        raise UnsupportedError(
            f"TFLite Micro lacks the operator {_listed(lacking)}; replace it in the network "
            f"(it has {close} and {len(known)} in all)."
        )


def _names(found: Iterable[Operator]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.name for each in found))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


MAGIC = b"OGLD"
_HEAD = struct.Struct("<4sIII")


@dataclass(frozen=True)
class GoldenPair:
    """One input of a model and its output, as bytes of int8 numbers."""

    input: bytes
    output: bytes


def golden_of(pairs: tuple[GoldenPair, ...], left_out: int = 0) -> Golden:
    return Golden(
        count=len(pairs),
        inputs_sha256=hashlib.sha256(b"".join(pair.input for pair in pairs)).hexdigest(),
        outputs=tuple(pair.output.hex() for pair in pairs),
        left_out=left_out,
    )


def read_golden(path: Path) -> tuple[GoldenPair, ...]:
    """The pairs of a file. Raises SpecError if it is not such a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    return parse_golden(data, str(path))


def parse_golden(data: bytes, what: str) -> tuple[GoldenPair, ...]:
    """The pairs of a file's content; `what` is its name in the error's sentence."""
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise SpecError(f"{what} holds no golden vectors: it does not begin with {MAGIC.decode()}.")
    _, count, input_bytes, output_bytes = _HEAD.unpack_from(data)
    if not 1 <= count <= MOST_GOLDEN or max(input_bytes, output_bytes) > LARGEST_TENSOR:
        raise SpecError(f"{what} is damaged: it names {count} golden vectors of {input_bytes} bytes.")
    if len(data) != _HEAD.size + count * (input_bytes + output_bytes):
        raise SpecError(f"{what} is damaged: it has {len(data)} bytes, which its head does not say.")
    pair = struct.Struct(f"{input_bytes}s{output_bytes}s")
    return tuple(GoldenPair(*each) for each in pair.iter_unpack(data[_HEAD.size :]))


ONE = 1e-3
"""How far the sum of a distribution may be from 1."""


def agreement(floats: NDArray[np.float32], integers: NDArray[np.int8], output: TensorFormat) -> Agreement:
    """Both hold one row of class scores for each input: probabilities, else logits. A probability that INT8 cannot tell
    from 0 counts as half a step, so that the divergence stays finite."""
    count = len(integers)
    if floats.ndim != 2 or floats.shape[1] < 2:
        return Agreement(samples=count, reason="The output is no distribution over classes.")
    expected = floats[:count].astype(np.float64)
    if not np.isfinite(expected).all():
        return Agreement(samples=count, reason="The FP32 network answers with NaN or infinity.")
    if not np.ptp(expected, axis=0).any() and count > 1:
        return Agreement(samples=count, reason="The FP32 network answers the same to each held-out input.")
    found = (integers.astype(np.float64) - output.zero_point) * output.scale
    top1 = float(np.mean(expected.argmax(axis=1) == found.argmax(axis=1)))
    both = [expected, np.maximum(found, output.scale / 2)]
    if (expected < 0).any() or not np.allclose(expected.sum(axis=1), 1, atol=ONE):
        both = [np.exp(each - each.max(axis=1, keepdims=True)) for each in (expected, found)]
    one, other = (each / each.sum(axis=1, keepdims=True) for each in both)
    ratio = np.log(np.maximum(one, 1e-300)) - np.log(np.maximum(other, 1e-300))
    divergence = np.where(one > 0, one * ratio, 0.0).sum(axis=1)
    return Agreement(samples=count, top1=top1, kld_mean=max(0.0, float(divergence.mean())))
