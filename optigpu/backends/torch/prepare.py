"""An order -> the runtime that its workload runs on."""

from collections.abc import Callable
from typing import cast

from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.backends.torch.passes import PassRuntime
from optigpu.backends.torch.runtime import ModelRuntime, TorchRuntime
from optigpu.workloads.base import Task


def prepare(order: Order, progress: Callable[[str], None]) -> Runtime:
    """A model, loaded for the workload's task, with the stack applied; or the bare device."""
    task = order.workload.task
    if order.model is None:
        return cast(Runtime, TorchRuntime(order.device, order.seed))
    if task is Task.DECODING:
        return cast(Runtime, ModelRuntime(order.model, order.stack, order.device, order.seed, progress))
    return cast(Runtime, PassRuntime(task, order.model, order.stack, order.device, order.seed, progress))
