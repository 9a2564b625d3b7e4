"""One step of training in each precision, and gradients accumulated over small batches. Images and labels are on the
model's device. A model returns logits, or, as transformers' do, an object that has them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch.amp import GradScaler

from optigpu.facade.benchmark_result import Indexed
from optigpu.facade.functions.timing import device_for
from optigpu.vocabulary import OptiGPUError, SpecError

CLIP_NORM = 1.0
"""The most that the norm of the gradient may be, where it is clipped."""

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean loss of a batch, from its logits and its labels."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs, and the label of each."""


def logits_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """What the model returns for the inputs, or its `logits`."""
    found = model(inputs)
    logits: torch.Tensor = getattr(found, "logits", found)
    return logits


def train_step_fp32(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    imgs: torch.Tensor,
    labels: torch.Tensor,
    criterion: Criterion,
) -> float:
    """A step of training in float32; returns the loss before it.

    Raises OptiGPUError for a loss that is not finite, before any weight changes, and for a model without a parameter
    to train.

    >>> import torch
    >>> from optigpu import train_step_fp32
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> imgs, labels = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> criterion = torch.nn.CrossEntropyLoss()
    >>> first = train_step_fp32(model, optimizer, imgs, labels, criterion)
    >>> train_step_fp32(model, optimizer, imgs, labels, criterion) < first
    True
    """
    optimizer.zero_grad()
    return _updated(optimizer, criterion(logits_of(model, imgs), labels))


def train_step_bf16(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    imgs: torch.Tensor,
    labels: torch.Tensor,
    criterion: Criterion,
) -> float:
    """A step whose forward pass computes in bfloat16 under autocast, with the gradient's norm clipped to 1. bfloat16
    has the range of float32, so that its losses need no scaling. Weights and the optimizer stay float32. Raises as
    train_step_fp32."""
    optimizer.zero_grad()
    with torch.autocast(imgs.device.type, torch.bfloat16):
        loss = criterion(logits_of(model, imgs), labels)
    return _updated(optimizer, loss, clipped=model)


def train_step_fp16(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    imgs: torch.Tensor,
    labels: torch.Tensor,
    criterion: Criterion,
    scaler: GradScaler,
) -> float:
    """A step whose forward pass computes in float16 under autocast, with scaled losses and the gradient's norm clipped.
    float16 ends at 65,504 and loses what is below 6e-8, so that the scaler raises losses before the backward pass, and
    leaves out a step whose gradients are not finite: then the loss that is returned may be infinite or NaN. Gradients
    are scaled back before they are clipped (Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740).
    Raises OptiGPUError for a model without a parameter to train."""
    optimizer.zero_grad()
    with torch.autocast(imgs.device.type, torch.float16):
        loss = criterion(logits_of(model, imgs), labels)
    scaler.scale(_trainable(loss)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    scaler.step(optimizer)
    scaler.update()
    return float(loss.item())


@dataclass(frozen=True)
class AccumulatedStep(Indexed):
    """One update: how many samples its gradient is of, and their mean loss before it."""

    step: int
    effective_batch: int
    loss: float


def train_with_gradient_accumulation(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    train_loader: Iterable[Batch],
    criterion: Criterion,
    accumulation_steps: int = 4,
    device: str | None = None,
    precision: str = "bf16",
) -> list[AccumulatedStep]:
    """Trains on every batch once, with one update for `accumulation_steps` of them: in the memory of a small batch.
    Each batch weighs as much as its share of the samples, so that the gradient is that of the whole. What is left at
    the end makes an update of its own. `precision` is that of the forward pass, bf16 or fp32. `device` None is CUDA
    where there is a GPU, and else this CPU. Raises as train_step_fp32, SpecError for another precision or less than one
    step, and UnsupportedError for a device that is not here."""
    if accumulation_steps < 1:
        raise SpecError(
            f"accumulation_steps: {accumulation_steps} is less than 1; name how many batches make an update."
        )
    if precision not in ("bf16", "fp32"):
        raise SpecError(f"precision: {precision!r} is unknown; the precisions are bf16 and fp32.")
    place = device_for(device)
    model = model.to(place).train()
    autocast = torch.autocast(place.type, torch.bfloat16, enabled=precision == "bf16")
    left, steps = iter(train_loader), list[AccumulatedStep]()
    while group := list(islice(left, accumulation_steps)):
        optimizer.zero_grad()
        samples = sum(len(labels) for _, labels in group)
        loss = 0.0
        for inputs, labels in group:
            with autocast:
                mean = criterion(logits_of(model, inputs.to(place)), labels.to(place))
            share = mean * (len(labels) / samples)
            _trainable(share).backward()
            loss += _finite(share)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        steps.append(AccumulatedStep(len(steps) + 1, samples, loss))
        print(f"Step {len(steps)} | Effective batch: {samples} | Loss: {loss:.4f}")
    return steps


def _updated(
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, clipped: torch.nn.Module | None = None
) -> float:
    """The backward pass and the update; the norm of the gradient of `clipped` is clipped before it."""
    _trainable(loss).backward()
    value = _finite(loss)
    if clipped is not None:
        torch.nn.utils.clip_grad_norm_(clipped.parameters(), CLIP_NORM)
    optimizer.step()
    return value


def _trainable(loss: torch.Tensor) -> torch.Tensor:
    if not loss.requires_grad:
        raise OptiGPUError(
            "No parameter of this model is trained: all are frozen; call requires_grad_(True) on the model or a layer."
        )
    return loss


def _finite(loss: torch.Tensor) -> float:
    # asked after the backward pass was started: a GPU computes it while the host waits for the number
    value = float(loss.item())
    if not math.isfinite(value):
        raise OptiGPUError(
            f"The loss is {value}; lower the learning rate, or look for NaN in the inputs and the weights."
        )
    return value
