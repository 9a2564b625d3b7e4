"""The TrainingRuntime of a transformers model.

It counts the operations of a step: those of the model, and those that were executed.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from optigpu.backends.runtime import MemoryPeaks
from optigpu.backends.torch.memory import operator_peaks_of
from optigpu.backends.torch.runtime import TorchModelRuntime
from optigpu.backends.torch.training.model import TrainableModel
from optigpu.backends.torch.training.step import Trainer
from optigpu.backends.training import StepFlops, TrainedStep, TrainingBatch
from optigpu.documents.facts import WeightFacts
from optigpu.vocabulary import DeviceKind

_aten = torch.ops.aten
_FUSED_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
}
"""They compute the scores again, which no attention has stored. Arguments: gradient, queries, keys, values."""


class TorchTrainingRuntime(TorchModelRuntime):
    """Steps of training of a transformers model."""

    def __init__(self, applied: TrainableModel, folder: Path) -> None:
        super().__init__(applied, folder)
        self.training = applied
        self.facts = applied.facts

    def weights(self) -> WeightFacts:
        """As of every model, and how many weights are trained."""
        return super().weights().model_copy(update={"trainable": self.training.trainable})

    def footprint(self) -> None:
        """None: the operations of a step are counted instead."""

    def step(self, batch: TrainingBatch) -> TrainedStep:
        """One timed step."""
        return self.training.step(batch)

    def restart(self) -> None:
        """As before the first step."""
        self.training.restart()

    def gradient_norm(self, batch: TrainingBatch) -> float:
        """Of the mean loss."""
        return self.training.gradient_norm(batch)

    def step_flops(self, batch: TrainingBatch) -> StepFlops:
        """Counted operator by operator, forward and backward."""
        return flops_of(self.training.trainer, batch)

    def observe(self, batch: TrainingBatch) -> None:
        """Records which attention kernels run."""
        self.training.observe(batch)

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """CUDA's allocator's; on a CPU weights, states of the optimizer, and all that torch allocates in the step."""
        if self.device is DeviceKind.CPU:
            return operator_peaks_of(run, self.training.held())
        return super().peak_memory(run)


def flops_of(trainer: Trainer, batch: TrainingBatch) -> StepFlops:
    """The operations of a step's losses and gradients; no weight changes. What is compiled runs uncompiled here."""
    counted = _Operations()
    with _uncompiled(), counted:
        trainer.with_gradients(batch, lambda: 0.0)
    return StepFlops(model=counted.all - counted.again, hardware=counted.all)


class _Operations(TorchDispatchMode):
    """Adds up the operations of all matrix products and convolutions, and of those that were executed before.

    Gradients are not computed of what a backward pass computes. So an operator that runs within one while autograd
    records is a recomputation: torch.utils.checkpoint and whoever else stores less runs it again to have its result.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.all, self.again = 0.0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator and counts it."""
        given = kwargs or {}
        out = func(*args, **given)
        operator = getattr(func, "_overloadpacket", func)
        formula = _OF_CPU.get(operator) or flop_registry.get(operator)
        if formula is None:
            return out
        flops = formula(*args, **given, out_val=out)
        self.all += flops
        if _in_backward() and torch.is_grad_enabled():
            self.again += flops
        elif operator in _FUSED_BACKWARD:
            self.again += _scores_flops(*args[1:3])
        return out


def _attention_on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_on_cpu(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_OF_CPU: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_on_cpu,
}
"""torch's registry has the fused attention of GPUs alone."""


def _scores_flops(query: torch.Tensor, key: torch.Tensor) -> float:
    """Of the products of queries and keys, [batch, heads, length, head size] each."""
    return 2.0 * query.numel() * key.shape[-2]


def _in_backward() -> bool:
    """Whether a backward pass runs in this thread; torch.utils.checkpoint asks the same way."""
    return torch._C._current_graph_task_id() != -1


def _uncompiled() -> AbstractContextManager[Any]:
    """A mode that looks at operators cannot see into compiled code; without Dynamo there is none."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
