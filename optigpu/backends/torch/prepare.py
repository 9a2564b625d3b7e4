"""Loads the model of an order, applies the stack, and makes its runtime."""

from collections.abc import Callable

from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.passes import PassModel
from optigpu.backends.torch.runtime import TorchDecodingRuntime, TorchPassRuntime
from optigpu.backends.torch.training.model import TrainableModel
from optigpu.backends.torch.training.runtime import TorchTrainingRuntime
from optigpu.vocabulary import Task


def prepare(order: Order, model: str, progress: Callable[[str], None]) -> Runtime:
    """The model, loaded for the workload's task, with the stack applied.

    Raises UnsupportedError when this machine or this model cannot do it.
    """
    task, given = order.workload.task, (model, order.stack, order.device, order.seed, progress)
    if task is Task.DECODING:
        return TorchDecodingRuntime(DecodingModel(*given), order.folder)
    rule = order.workload.update_rule
    if rule is not None:
        return TorchTrainingRuntime(TrainableModel(rule, *given), order.folder)
    return TorchPassRuntime(PassModel(task, *given), order.folder)
