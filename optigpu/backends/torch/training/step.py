"""A step of training: arranges, computes losses and gradients, and changes the weights, each part timed."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from optigpu.backends.torch.device import Clock
from optigpu.backends.training import (
    MakeOptimizer,
    MicroBatch,
    TrainedStep,
    TrainingBatch,
    TrainingParts,
    UpdateRule,
)
from optigpu.vocabulary import UnsupportedError

_HALVINGS = 40
"""How often the scale of a loss is halved until its gradient is finite."""


class Trainer:
    """Trains a model with the parts that its stack has left."""

    def __init__(self, model: Module, parts: TrainingParts, device: str) -> None:
        """Raises UnsupportedError if no weight can be trained, or if parts cannot go together."""
        self.parts, self._device = parts, device
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not self.weights:
            raise UnsupportedError(
                "No weight of this model requires a gradient, so that nothing would be trained; add adapters (lora) "
                "to a model whose weights are frozen."
            )
        if parts.in_backward and (parts.loss_scaling or parts.clip_norm is not None):
            raise UnsupportedError(
                "Loss scaling and clipping need the whole gradient, and updates within the backward pass free it "
                "piece by piece; leave optimizer_in_backward out."
            )
        norms = (module for module in model.modules() if isinstance(module, _NormBase))
        changing = [*self.weights, *(buffer for norm in norms for buffer in norm.buffers(recurse=False))]
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in changing]
        self._in_backward: UpdatesInBackward | None = None
        self._begin()

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._in_backward.optimizers if self._in_backward else [self._optimizer]

    @property
    def loss_scale(self) -> float:
        return float(self._scaler.get_scale())

    def restart(self) -> None:
        """Weights, buffers and optimizer are again as they were."""
        with torch.no_grad():
            for tensor, kept in self._kept:
                tensor.copy_(kept)
        self._free_gradients()
        self._begin()

    def step(self, batch: TrainingBatch, clock: Clock) -> TrainedStep:
        """One timed step. Its loss is read after the last mark, since that waits for the device."""
        parts, marks = ["data"], [clock.mark()]

        def enter(part: str) -> None:
            parts.append(part)
            marks.append(clock.mark())

        rows = self.parts.arrange(batch)
        targets, losses = sum(each.targets for each in rows), []
        for each in rows:
            enter("forward")
            loss = self.forward(each)
            enter("backward")
            self._scaler.scale(loss / targets).backward()
            losses.append(loss.detach())
        enter("optimizer")
        self.update()
        marks.append(clock.mark())
        seconds = dict.fromkeys(parts, 0.0)
        for part, took in zip(parts, clock.seconds(marks), strict=True):
            seconds[part] += took
        return TrainedStep(
            loss=float(sum(losses)) / targets,
            data_s=seconds["data"],
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            optimizer_s=seconds["optimizer"],
            computed_tokens=sum(
                each.inputs["input_ids"].numel() for each in rows if "input_ids" in each.inputs
            ),
        )

    def forward(self, rows: MicroBatch) -> torch.Tensor:
        with ExitStack() as contexts:
            for around in self.parts.around:
                contexts.enter_context(around())
            return self.parts.loss(rows)

    def gradient_norm(self, batch: TrainingBatch) -> float:
        """The 2-norm of the gradient of the mean loss; with scaling, at the largest scale at which it is finite."""

        def read() -> float:
            gradients = [weight.grad for weight in self.weights if weight.grad is not None]
            return float(get_total_norm(gradients))

        scale = self.loss_scale
        for _ in range(_HALVINGS):
            norm = self.with_gradients(batch, read, scale) / scale
            if norm < float("inf") or not self.parts.loss_scaling:
                return norm
            scale /= 2
        return float("inf")

    def with_gradients(self, batch: TrainingBatch, read: Callable[[], float], scale: float = 1.0) -> float:
        """What `read` finds when the gradients of the mean loss times `scale` are there; no weight changes."""
        if self._in_backward:
            self._in_backward.paused = True
        try:
            rows = self.parts.arrange(batch)
            targets = sum(each.targets for each in rows)
            for each in rows:
                (self.forward(each) * (scale / targets)).backward()
            return read()
        finally:
            self._free_gradients()
            if self._in_backward:
                self._in_backward.paused = False

    def _begin(self) -> None:
        if self._in_backward:
            self._in_backward.remove()
        self._scaler = GradScaler(self._device, enabled=self.parts.loss_scaling)
        if self.parts.in_backward:
            self._in_backward = UpdatesInBackward(self.weights, self.parts.optimizer)
        else:
            self._optimizer = self.parts.optimizer(self.weights)

    def update(self) -> None:
        if self._in_backward:
            return
        if self.parts.clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self.weights, self.parts.clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def _free_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = None


FOREACH = ("cuda", "xpu")
"""torch's names of devices whose optimizers update all weights together, unless they are told otherwise."""
_CLASSES: dict[str, type[AdamW] | type[SGD]] = {"adamw": AdamW, "sgd": SGD}


def optimizer_of(rule: UpdateRule) -> MakeOptimizer:
    def make(weights: Sequence[Parameter]) -> Optimizer:
        return _CLASSES[rule.name](weights, lr=rule.learning_rate)

    return make


def implementation_of(optimizer: Optimizer) -> str:
    """ "fused", "foreach", or "for-loop" over one weight after the other; the module of another library's optimizer."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return type(optimizer).__module__
    (group, *_) = optimizer.param_groups
    if group.get("fused"):
        return "fused"
    chosen = group.get("foreach")
    by_default = all(weight.device.type in FOREACH for weight in group["params"])
    return "foreach" if chosen or (chosen is None and by_default) else "for-loop"


class UpdatesInBackward:
    """One for each weight, run once its gradient is complete, which it frees; none while `paused`."""

    def __init__(self, weights: Sequence[Parameter], make: MakeOptimizer) -> None:
        self.optimizers = [make([weight]) for weight in weights]
        self.paused = False
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._updating(optimizer))
            for weight, optimizer in zip(weights, self.optimizers, strict=True)
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _updating(self, optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
        def update(_weight: torch.Tensor) -> None:
            if not self.paused:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return update
