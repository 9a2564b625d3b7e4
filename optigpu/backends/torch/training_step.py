"""A model with the whole stack applied, ready to be trained, and a step of training.

A step arranges, computes losses and gradients, and changes the weights, each part timed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module, Parameter, functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer
from transformers import PreTrainedModel

from optigpu.backends.torch import load_options, mode_options
from optigpu.backends.torch.applied import AppliedModel, arithmetic_of, load_for
from optigpu.backends.torch.attention import only_kernel
from optigpu.backends.torch.device import Clock, clock_for
from optigpu.backends.training import (
    NO_TARGET,
    Arrange,
    LabelledImages,
    LossOf,
    MakeOptimizer,
    MicroBatch,
    Texts,
    TrainedStep,
    TrainingBatch,
    TrainingParts,
    UpdateRule,
)
from optigpu.hardware.device_kinds import torch_name
from optigpu.models.described import Facts
from optigpu.models.loading.load import classifies_images, count_weights, loaded_facts, loaded_image_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, Task, UnsupportedError

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


_NOT_OF_ATTENTION = re.compile(r"log_?soft_?max|^autograd::|Backward\d$", re.IGNORECASE)
"""The softmax of the loss, and autograd's own names of what runs under another."""


class TrainableModel(AppliedModel):
    """A decoder or an image classifier with a stack applied; techniques' `modules` may freeze some of its weights."""

    def __init__(
        self,
        rule: UpdateRule,
        model: str,
        stack: tuple[Technique, ...],
        device: DeviceKind,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(device, seed)
        self._parts_clock = clock_for(device)
        self.reference = parse_reference(model)
        progress("loading")
        options = load_options(stack)
        self.modes = mode_options(stack).but(autograd="grad")
        for_images = classifies_images(self.reference)
        task = Task.IMAGES if for_images else Task.PREFILL
        self.model = load_for(task, self.reference, options, device, seed)
        self.facts: Facts = loaded_image_facts(self.model) if for_images else loaded_facts(self.model)
        self.weights = count_weights(self.model)
        for weight in self.model.parameters():
            weight.requires_grad_(weight.is_floating_point())
        self.model.train()
        dropout = turn_off_dropout(self.model)
        self._change_model(stack, progress)
        self.trainer = Trainer(self.model, self._parts(rule, stack, options.dtype), torch_name(device))
        self._record_options(options)
        self._record_training(rule, dropout)
        torch.manual_seed(seed)

    @property
    def trainable(self) -> int:
        return sum(weight.numel() for weight in self.trainer.weights)

    def step(self, batch: TrainingBatch) -> TrainedStep:
        """One timed step. A profiler that takes the clock's place sees where the step begins and ends."""
        clock = self.clock
        with only_kernel(self.modes.attention_kernel):
            begin = clock.mark()
            done = self.trainer.step(batch, self._parts_clock)
            clock.seconds([begin, clock.mark()])
        return done

    def restart(self) -> None:
        """As before the first step, random numbers included."""
        self.trainer.restart()
        torch.manual_seed(self.seed)

    def gradient_norm(self, batch: TrainingBatch) -> float:
        with only_kernel(self.modes.attention_kernel):
            return self.trainer.gradient_norm(batch)

    def observe(self, batch: TrainingBatch) -> None:
        names = self.attention_kernels(lambda: self.gradient_norm(batch))
        self.notes.record(attention_kernels=[name for name in names if not _NOT_OF_ATTENTION.search(name)])

    def held(self) -> Iterator[torch.Tensor]:
        """What lies in memory between two steps: weights, buffers, gradients, and the states of the optimizer."""
        for weight in self.model.parameters():
            yield weight.detach()
            if weight.grad is not None:
                yield weight.grad
        yield from self.model.buffers()
        for optimizer in self.trainer.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _parts(self, rule: UpdateRule, stack: tuple[Technique, ...], dtype: str) -> TrainingParts:
        parts = TrainingParts(
            arrange=arranging_on(self.model.device, getattr(torch, dtype)),
            loss=loss_of(self.model),
            optimizer=optimizer_of(rule),
            rule=rule,
        )
        for technique in stack:
            parts = technique.training(parts, self.model, self.notes)
        return parts

    def _record_training(self, rule: UpdateRule, dropout: dict[str, float]) -> None:
        how = implementation_of(self.trainer.optimizers[0])
        why = "A training step reads the weights several times; its operations are counted."
        self.notes.record(
            optimizer={"name": rule.name, "learning_rate": rule.learning_rate, "implementation": how},
            dropout={"now": 0.0, "of the model": dropout},
            reasons={"footprint": why},
            **arithmetic_of(self.model, self.device),
        )


def turn_off_dropout(model: Module) -> dict[str, float]:
    """Sets all probabilities, in numbers whose names contain "drop" too, to 0; returns {"GPT2Attention.dropout":
    0.1}."""
    found: dict[str, float] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_one = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
            if is_one and isinstance(value, float) and value > 0:
                found[f"{type(module).__name__}.{name}"] = value
                setattr(module, name, 0.0)
    return found


def arranging_on(device: torch.device, dtype: torch.dtype) -> Arrange:
    """One micro-batch of all samples: documents in padded rows, images in `dtype`."""

    def arrange(batch: TrainingBatch) -> list[MicroBatch]:
        if isinstance(batch, LabelledImages):
            inputs = {"pixel_values": torch.from_numpy(batch.images).to(device, dtype)}
            labels, targets = batch.labels, len(batch.labels)
        else:
            ids, labels = padded_rows(batch)
            inputs = {"input_ids": torch.from_numpy(ids).to(device)}
            targets = int((labels != NO_TARGET).sum())
        return [MicroBatch(inputs, torch.from_numpy(labels).to(device), targets)]

    return arrange


def padded_rows(texts: Texts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and labels (the next tokens), [documents, length] each, padded on the right, so that no mask is needed."""
    shape = (len(texts.documents), texts.length)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, NO_TARGET, np.int64)
    for row, document in enumerate(texts.documents):
        ids[row, : len(document)] = document
        labels[row, : len(document) - 1] = document[1:]
    return ids, labels


def loss_of(model: PreTrainedModel) -> LossOf:
    """The model's forward pass and the summed cross entropy of its logits, in float32."""

    def loss(rows: MicroBatch) -> torch.Tensor:
        # A cache of keys and values would only be thrown away.
        cached = {"use_cache": False} if "input_ids" in rows.inputs else {}
        logits = model(**rows.inputs, **cached).logits
        return functional.cross_entropy(
            logits.float().flatten(0, -2), rows.labels.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )

    return loss
