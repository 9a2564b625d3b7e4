"""Multiply-accumulates of a model's operators, for one input, from the shapes of their tensors. Counted are the
products of linear operators, as published figures count them. What adds, compares, pools or scales costs time as well,
and counts as 0."""

from collections import defaultdict

from optigpu.documents.manifest import OperatorCount
from optigpu.edge.tflite import Model, Operator, Tensor
from optigpu.vocabulary import SpecError


def operator_counts(model: Model) -> tuple[OperatorCount, ...]:
    """Each kind of operator with its number and its MACs, those with the most MACs first."""
    counts: dict[str, list[int]] = defaultdict(list)
    for operator in model.operators:
        counts[operator.name].append(macs_of(operator))
    made = [OperatorCount(name=name, count=len(macs), macs=sum(macs)) for name, macs in counts.items()]
    return tuple(sorted(made, key=lambda each: (-each.macs, each.name)))


def macs_of(operator: Operator) -> int:
    """Multiply-accumulates of one operator. Raises SpecError if its tensors are not those of such an operator."""
    try:
        return _macs(operator)
    except (IndexError, ValueError):
        raise SpecError(
            f"{operator.name}: The operator's tensors do not have the shapes that it needs."
        ) from None


def _input(operator: Operator, number: int) -> Tensor:
    tensor = operator.inputs[number]
    if tensor is None:
        raise IndexError
    return tensor


def _macs(operator: Operator) -> int:
    match operator.name:
        case "CONV_2D":  # filter (channels, height, width, channels of a group)
            _, height, width, depth = _input(operator, 1).shape
            return operator.outputs[0].elements * height * width * depth
        case (
            "DEPTHWISE_CONV_2D"
        ):  # filter (1, height, width, channels): a sum over the window of the own channel
            _, height, width, _ = _input(operator, 1).shape
            return operator.outputs[0].elements * height * width
        case (
            "TRANSPOSE_CONV"
        ):  # the output's shape, filter (channels out, height, width, channels in), tensor
            channels, height, width, _ = _input(operator, 1).shape
            return _input(operator, 2).elements * height * width * channels
        case "FULLY_CONNECTED":  # weights (outputs, inputs)
            _, depth = _input(operator, 1).shape
            return operator.outputs[0].elements * depth
        case (
            "BATCH_MATMUL"
        ):  # (..., rows, depth) times (..., depth, columns), either of them transposed or not
            left, rows = _input(operator, 0).shape, operator.outputs[0].shape[-2]
            return operator.outputs[0].elements * (left[-1] if left[-2] == rows else left[-2])
        case (
            "UNIDIRECTIONAL_SEQUENCE_LSTM" | "SVDF"
        ):  # each constant matrix once for each step; the batch is 1
            first = _input(operator, 0).shape
            steps = first[0] * first[1] if len(first) == 3 else 1
            constant = (each for each in operator.inputs if each and each.constant_bytes)
            return steps * sum(each.elements for each in constant if len(each.shape) == 2)
    return 0
