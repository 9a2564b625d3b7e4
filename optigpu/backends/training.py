"""The interface between a backend that trains, the workload `train_step`, and the techniques of the layer `training`.

Outside of a step all arrays are numpy arrays; within it the parts below are torch's, and techniques change them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import Images, Runtime
from optigpu.models.described import Facts
from optigpu.vocabulary import Changeable

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter
    from torch.optim import Optimizer

NO_TARGET = -100
"""The label of a position where nothing is predicted; torch's cross_entropy ignores it."""


@dataclass(frozen=True)
class Texts:
    """Documents to learn, each an array of token ids, [tokens]; a row of a batch has `length` tokens."""

    documents: tuple[NDArray[np.int64], ...]
    length: int

    def split(self, parts: int) -> "list[Texts]":
        """So many parts with as many documents each, which `parts` must divide."""
        size = len(self.documents) // parts
        return [Texts(self.documents[part * size : (part + 1) * size], self.length) for part in range(parts)]


@dataclass(frozen=True)
class LabelledImages:
    """Images [batch, channels, height, width] and their classes [batch]."""

    images: Images
    labels: NDArray[np.int64]

    def split(self, parts: int) -> "list[LabelledImages]":
        """So many parts with as many images each, which `parts` must divide."""
        pairs = zip(np.split(self.images, parts), np.split(self.labels, parts), strict=True)
        return [LabelledImages(images, labels) for images, labels in pairs]


TrainingBatch = Texts | LabelledImages
"""The samples of one step."""


@dataclass(frozen=True)
class TrainedStep:
    """One step: its mean loss over all targets, and how long each part took; an optimizer within the backward pass
    counts as that. `computed_tokens` are those of all rows, padding included; 0 for images."""

    loss: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    computed_tokens: int = 0

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class StepFlops:
    """Operations of matrix products and convolutions in one step: `hardware` are all that were executed, `model` those
    that the model needs without recomputing anything, of real tokens and padding alike."""

    model: float
    hardware: float


@dataclass(frozen=True)
class TrainingNeed:
    """Bytes of a step: of weights and buffers, of all that is held between steps, and of the peak."""

    weight_bytes: int
    held_bytes: int
    peak_bytes: int


class TrainingRuntime(Runtime, Protocol):
    """The runtime of a workload that trains."""

    facts: Facts

    def step(self, batch: TrainingBatch) -> TrainedStep:
        """One timed step; it changes the weights."""

    def restart(self) -> None:
        """Weights, optimizer and random numbers are again as they were before the first step."""

    def gradient_norm(self, batch: TrainingBatch) -> float:
        """The 2-norm of the gradient of the mean loss, before clipping; the weights stay as they are."""

    def step_flops(self, batch: TrainingBatch) -> StepFlops:
        """The operations of a step; slow, and never timed."""

    def observe(self, batch: TrainingBatch) -> None:
        """Records facts that only a step can show in the notes; slow, and never timed."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    `inputs` are the arguments of its forward pass. `labels` are int64 and stand where their logits do: [rows, length]
    of the next tokens, or [batch] of classes; NO_TARGET where nothing is predicted. `targets` counts the others.
    """

    inputs: dict[str, "torch.Tensor"]
    labels: "torch.Tensor"
    targets: int


Arrange = Callable[[TrainingBatch], Sequence[MicroBatch]]
"""Arranges the samples of a step in rows on the device, as micro-batches whose gradients are added up."""

LossOf = Callable[[MicroBatch], "torch.Tensor"]
"""The forward pass: the sum of the losses of all targets, a scalar. The engine divides by the targets of the step."""

MakeOptimizer = Callable[[Sequence["Parameter"]], "Optimizer"]
"""Makes the optimizer of these weights, with the workload's learning rate."""

Around = Callable[[], AbstractContextManager[Any]]
"""Makes a context for one forward pass."""


@dataclass(frozen=True)
class UpdateRule:
    """The optimizer that the workload asks for; torch's defaults hold for all that is not named here."""

    name: Literal["adamw", "sgd"]
    learning_rate: float


@dataclass(frozen=True)
class TrainingParts(Changeable):
    """What a step of training is made of; a technique's hook `training` returns it with its changes.

    `optimizer` follows `rule`, which is for techniques that put another implementation in its place. `around` are
    entered around each forward pass, the last one innermost. `loss_scaling` multiplies losses so that gradients do not
    vanish in float16, and leaves a step out whose gradients are not finite. `clip_norm` is the most that the norm of
    the whole gradient may be. With `in_backward` each weight is updated as soon as its gradient is there, which is then
    freed.
    """

    arrange: Arrange
    loss: LossOf
    optimizer: MakeOptimizer
    rule: UpdateRule
    around: tuple[Around, ...] = ()
    loss_scaling: bool = False
    clip_norm: float | None = None
    in_backward: bool = False
