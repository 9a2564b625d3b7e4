"""The TrainingRuntime of a transformers model, which counts the operations of a step: the model's, and all executed."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from optigpu.backends.runtime import MemoryPeaks
from optigpu.backends.torch.device import operator_peaks_of
from optigpu.backends.torch.runtime import TorchModelRuntime
from optigpu.backends.torch.training.model import TrainableModel
from optigpu.backends.torch.training.step import Trainer
from optigpu.backends.training import StepFlops, TrainingBatch
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
    def __init__(self, applied: TrainableModel, folder: Path) -> None:
        super().__init__(applied, folder)
        self.training = applied
        self.facts = applied.facts
        self.step, self.restart, self.observe = applied.step, applied.restart, applied.observe
        self.gradient_norm = applied.gradient_norm

    def weights(self) -> WeightFacts:
        return super().weights().model_copy(update={"trainable": self.training.trainable})

    def footprint(self) -> None:
        """None: the operations of a step are counted instead."""

    def step_flops(self, batch: TrainingBatch) -> StepFlops:
        return flops_of(self.training.trainer, batch)

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """CUDA's allocator's; on a CPU weights, states of the optimizer, and all that torch allocates in the step."""
        if self.device is DeviceKind.CPU:
            return operator_peaks_of(run, self.training.held())
        return super().peak_memory(run)


def flops_of(trainer: Trainer, batch: TrainingBatch) -> StepFlops:
    """The operations of a step's losses and gradients; no weight changes. What is compiled runs uncompiled here."""
    counted = _Operations()
    compiles = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiles else nullcontext(), counted:
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
        given = kwargs or {}
        out = func(*args, **given)
        operator = getattr(func, "_overloadpacket", func)
        formula = _OF_CPU.get(operator) or flop_registry.get(operator)
        if formula is None:
            return out
        flops = formula(*args, **given, out_val=out)
        self.all += flops
        # A backward pass runs in this thread; torch.utils.checkpoint asks the same way.
        if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            self.again += flops
        elif operator in _FUSED_BACKWARD:
            queries, keys = args[1:3]  # [batch, heads, length, head size] each
            self.again += 2.0 * queries.numel() * keys.shape[-2]
        return out


_OF_CPU: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda *args, **_: sdpa_flop_count(
        *(each.shape for each in args[:3])
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *args, **_: sdpa_backward_flop_count(
        *(each.shape for each in args[:4])
    ),
}
"""torch's registry has the fused attention of GPUs alone."""
