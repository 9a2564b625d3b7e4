"""A model with the whole stack applied, ready to be trained.

Dropout is off, so that the losses of two stacks differ by what the stacks change alone.
"""

import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module, functional
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from optigpu.backends.torch import load_options, mode_options
from optigpu.backends.torch.applied import AppliedModel, arithmetic_of, load_for
from optigpu.backends.torch.attention import only_kernel
from optigpu.backends.torch.device import clock_for
from optigpu.backends.torch.training.step import Trainer, implementation_of, optimizer_of
from optigpu.backends.training import (
    NO_TARGET,
    Arrange,
    LabelledImages,
    LossOf,
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
from optigpu.vocabulary import DeviceKind, Task

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
