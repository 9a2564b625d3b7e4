"""compare_precisions: steps of training in fp32, fp16 and bf16, one model after the other."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.amp import GradScaler

from optigpu.facade.benchmark_result import Indexed
from optigpu.facade.functions.timing import (
    CallTimes,
    ModelFn,
    device_for,
    peak_mb,
    place_name,
    resnet_50,
    timed,
)
from optigpu.facade.functions.train_steps import logits_of, train_step_bf16, train_step_fp16, train_step_fp32
from optigpu.models.loading.self_written import forked_random
from optigpu.statistics.estimates import Bounds
from optigpu.vocabulary import SpecError

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
