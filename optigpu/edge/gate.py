"""What a model must be to run on a microcontroller: INT8 throughout, shapes that are known, operators that it has."""

from collections.abc import Iterable

from optigpu.documents.manifest import LARGEST_OUTPUT, LARGEST_SCALE, TensorFormat
from optigpu.edge.tflite import FLOATS, Model, Operator, Tensor, macs_of, operators
from optigpu.vocabulary import UnsupportedError

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
