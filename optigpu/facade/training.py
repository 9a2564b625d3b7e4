"""Gradient checkpointing: a block that computes its activations again, and what that saves and costs. And one step of
training in each precision, gradients accumulated over small batches, and compare_precisions: steps in fp32, fp16 and
bf16, one model after the other. Images and labels are on the model's device. A model returns logits, or, as
transformers' do, an object that has them."""

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from optigpu.facade.benchmark_result import Indexed
from optigpu.facade.timing import (
    CallTimes,
    ModelFn,
    device_for,
    peak_mb,
    place_name,
    require_divisible,
    resnet_50,
    timed,
)
from optigpu.models.loading.self_written import forked_random
from optigpu.statistics.estimates import Bounds
from optigpu.vocabulary import OptiGPUError, SpecError, UnsupportedError

CLASSES = 1000
WARMUP = 1


class CheckpointedTransformerBlock(nn.Module):
    """A transformer's block with norms after the sums, whose two halves are computed again in the backward pass.

    Without `checkpointing` it is the same block with all activations kept, so that the two can be compared. Each half
    is a segment of its own, of which the input alone is kept (Chen et al., Training Deep Nets with Sublinear Memory
    Cost, 2016, arXiv:1604.06174).

    >>> import torch
    >>> from optigpu import CheckpointedTransformerBlock
    >>> block = CheckpointedTransformerBlock(d_model=16, n_heads=2)
    >>> block(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    def __init__(self, d_model: int = 768, n_heads: int = 12, checkpointing: bool = True) -> None:
        """Raises SpecError if the heads do not divide the width."""
        super().__init__()
        require_divisible(d_model, n_heads)
        self.checkpointing = checkpointing
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm1 = nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.norm2 = nn.LayerNorm(d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, d_model], and the same shape back."""
        halves: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
            lambda x: self.norm1(x + self.attn(x, x, x, need_weights=False)[0]),
            lambda x: self.norm2(x + self.ff(x)),
        )
        for half in halves:
            x = checkpoint(half, x, use_reentrant=False) if self.checkpointing else half(x)
        return x


def enable_gradient_checkpointing_hf(model: PreTrainedModel) -> None:
    """Turns transformers' own gradient checkpointing on, and the key-value cache off, which a block that is computed
    again would fill twice. Raises UnsupportedError for a model that is not of transformers, or whose family marks no
    block for it."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{kind} is no model of transformers; use torch.utils.checkpoint, or CheckpointedTransformerBlock."
        )
    if not model.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"transformers' {kind} has no gradient checkpointing; use torch.utils.checkpoint."
        )
    newer: Callable[[], None] | None = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()
    model.config.use_cache = False
    print(f"Gradient checkpointing enabled on {kind}")


@dataclass(frozen=True)
class CheckpointingRow(Indexed):
    """What a step of training takes: the median with its 95% interval in this process, and the peak memory in 2**20
    bytes: of CUDA's allocator, or of the tensors on a CPU, weights and the optimizer's state included. `vram_mb` is
    None on a CPU."""

    vram_mb: float | None
    step_ms: float
    peak_mb: float
    step_ms_ci: Bounds | None = None


def compare_checkpointing(
    seq_len: int = 2048,
    batch_size: int = 8,
    d_model: int = 768,
    n_layers: int = 12,
    n_heads: int = 12,
    device: str | None = None,
    n_steps: int = 10,
) -> dict[str, CheckpointingRow]:
    """Trains the same blocks without and with checkpointing, and prints what a step takes. `device` None is CUDA where
    there is a GPU, and else this CPU. Raises SpecError for heads that do not divide the width, and UnsupportedError for
    a device that is not here."""
    require_divisible(d_model, n_heads)
    place = device_for(device)
    print(f"Training {n_layers} blocks on {place_name(place)}, {batch_size} sequences of {seq_len}")
    results = {}
    for checkpointing in (False, True):
        name = "with checkpointing" if checkpointing else "without checkpointing"
        blocks = (CheckpointedTransformerBlock(d_model, n_heads, checkpointing) for _ in range(n_layers))
        model = nn.Sequential(*blocks, _FirstToken(), nn.Linear(d_model, CLASSES)).to(place)
        inputs = torch.randn(batch_size, seq_len, d_model, device=place)
        row = results[name] = _row(model, inputs, n_steps)
        print(f"{name}: peak {row.peak_mb:.1f}MB, step {row.step_ms:.1f}ms")
        del model
        gc.collect()
    return results


class _FirstToken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to [batch, width]."""
        return x[:, 0]


def _row(model: nn.Module, inputs: torch.Tensor, n_steps: int) -> CheckpointingRow:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = torch.randint(CLASSES, inputs.shape[:1], device=inputs.device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    times = timed(step, inputs.device, warmup=WARMUP, repeats=n_steps)
    optimizer.zero_grad()
    states = (each for state in optimizer.state.values() for each in state.values())
    held = [inputs, *model.parameters(), *(each for each in states if isinstance(each, torch.Tensor))]
    peak = peak_mb(step, held, inputs.device)
    return CheckpointingRow(
        peak if inputs.device.type == "cuda" else None, times.median_ms, peak, times.ci_ms
    )


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


PRECISIONS = ("FP32", "FP16", "BF16")
MOST_WARMUP = 10
"""Steps before the first timed one, or a tenth of all where that is less."""


@dataclass(frozen=True)
class PrecisionResult(Indexed):
    """What training in one precision takes: the median step with its 95% interval in this process, and the peak of
    CUDA's allocator in 2**20 bytes, None on a CPU."""

    vram_mb: float | None
    step_ms: float
    throughput_imgs_s: float
    step_ms_ci: Bounds | None = None


def compare_precisions(
    model_fn: ModelFn = resnet_50,
    n_steps: int = 100,
    batch_size: int = 32,
    img_size: int = 224,
    device: str | None = None,
    seed: int = 0,
) -> dict[str, PrecisionResult]:
    """Trains a new model of `model_fn` in each precision on random images, and prints what a step takes.

    Of `n_steps` steps the first tenth (10 at most) is warm-up; images are drawn outside of the time. `model_fn` is
    called without arguments, as torchvision's `models.resnet50`; the default is preset:resnet-50 with random weights.
    `device` None is CUDA where there is a GPU, and else this CPU.

    Raises SpecError for fewer than 2 steps and UnsupportedError for a device that is not here.

    >>> import torch
    >>> from optigpu import compare_precisions
    >>> def tiny():
    ...     return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(10))
    >>> results = compare_precisions(tiny, n_steps=4, batch_size=2, img_size=8, device="cpu")  # doctest: +ELLIPSIS
    Training on this CPU, batch 2, images of 8 x 8
    FP32: VRAM not measured, ...ms/step, ... img/s
    FP16: VRAM not measured, ...ms/step, ... img/s
    BF16: VRAM not measured, ...ms/step, ... img/s
    >>> results["BF16"]["step_ms"] > 0
    True
    """
    if n_steps < 2:
        raise SpecError(f"n_steps: {n_steps} leaves no step to time after the warm-up; ask for 2 or more.")
    place = device_for(device)
    print(f"Training on {place_name(place)}, batch {batch_size}, images of {img_size} x {img_size}")
    results = {}
    shape = (batch_size, 3, img_size, img_size)
    for name in PRECISIONS:
        with forked_random(place):
            torch.manual_seed(seed)
            results[name] = _trained(name, model_fn, n_steps, shape, place, seed)
        row = results[name]
        vram = "VRAM not measured" if row.vram_mb is None else f"VRAM={row.vram_mb:.0f}MB"
        print(f"{name}: {vram}, {row.step_ms:.1f}ms/step, {row.throughput_imgs_s:.0f} img/s")
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
    return results


def _trained(
    name: str, model_fn: ModelFn, n_steps: int, shape: tuple[int, ...], place: torch.device, seed: int
) -> PrecisionResult:
    model = model_fn().to(place).train()
    source = torch.Generator(place).manual_seed(seed)
    images = torch.randn(shape, generator=source, device=place)
    with torch.no_grad():
        classes = logits_of(model, images).shape[-1]
    labels = torch.randint(classes, shape[:1], generator=source, device=place)
    step = _step(name, model, images, labels)
    times: list[float] = []
    for _ in range(n_steps):
        images.normal_(generator=source)
        times += timed(step, place, warmup=0, repeats=1).samples_s
    found = CallTimes(tuple(times[min(MOST_WARMUP, max(1, n_steps // 10)) :]))
    vram = peak_mb(step, (), place) if place.type == "cuda" else None
    return PrecisionResult(vram, found.median_ms, 1e3 * shape[0] / found.median_ms, found.ci_ms)


def _step(
    name: str, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    criterion = torch.nn.CrossEntropyLoss()
    if name == "FP16":
        scaler = GradScaler(images.device.type)
        return lambda: train_step_fp16(model, optimizer, images, labels, criterion, scaler)
    plain = train_step_fp32 if name == "FP32" else train_step_bf16
    return lambda: plain(model, optimizer, images, labels, criterion)
