"""Makes the runtime of an order: loads the model and applies the stack."""

from collections.abc import Callable

from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.backends.torch.passes import PassModel
from optigpu.backends.torch.runtime import TorchDecodingRuntime, TorchPassRuntime
from optigpu.vocabulary import Task


def prepare(order: Order, progress: Callable[[str], None]) -> Runtime:
    """A model, loaded for the workload's task, with the stack applied; or the bare device.

    Raises UnsupportedError when this machine or this model cannot do it.
    """
    if order.model is None:
        return TorchOperatorRuntime(order.device, order.seed)
    task, given = order.workload.task, (order.model, order.stack, order.device, order.seed, progress)
    if task is Task.DECODING:
        return TorchDecodingRuntime(DecodingModel(*given), order.folder)
    return TorchPassRuntime(PassModel(task, *given), order.folder)
