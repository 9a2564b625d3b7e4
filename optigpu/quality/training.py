"""The losses of training from the first step on, and those of the fp32 model, the reference of a job."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.training import TrainingBatch, TrainingRuntime
from optigpu.documents.facts import LossQuality
from optigpu.quality.loss_curves import Curve, band_of, deviation_of, window_means
from optigpu.quality.reference import missing_reference
from optigpu.vocabulary import Frozen, OptiGPUError

_SETTING, _CURVES = "losses.json", "losses.npy"
NO_INTERVAL = "One curve of losses has no interval; facts.quality has the band that seeds make."

Draw = Callable[[], TrainingBatch]
"""Makes the samples of one step after the other."""
DrawOf = Callable[[int], Draw]
"""The same from a seed."""


class LossSetting(Frozen):
    """What a reference is made for: `workload` is the identity of the workload as canonical JSON."""

    model: str
    workload: str
    seed: int
    steps: int
    seeds: int


def write_loss_reference(
    folder: Path, setting: LossSetting, runtime: TrainingRuntime, draws: DrawOf
) -> LossSetting:
    """Trains the fp32 model from its first weights with each seed, and writes the losses; returns the setting.

    Raises OptiGPUError if a loss is not finite, or if chance moves the losses more than training does.
    """
    seeds = range(setting.seed, setting.seed + setting.seeds)
    curves = np.stack([train(runtime, draws(seed), setting.steps) for seed in seeds])
    band_of(curves)
    np.save(folder / _CURVES, curves)
    (folder / _SETTING).write_text(setting.model_dump_json())
    return setting


def compare_losses(
    folder: Path, setting: LossSetting, runtime: TrainingRuntime, draws: DrawOf
) -> LossQuality:
    """Trains over the samples of the reference's first seed, and compares the losses.

    Raises OptiGPUError when there is no reference, when it was made for another setting, or where the stack trains
    other weights than fp32 does.
    """
    _require_same_weights(runtime)
    return quality_of(train(runtime, draws(setting.seed), setting.steps), _open(folder, setting))


def final_loss(losses: Curve) -> float:
    """The mean of the last window."""
    return float(window_means(losses)[-1])


def quality_of(found: Curve, curves: NDArray[np.float64]) -> LossQuality:
    """Losses [steps] over the samples of the first of fp32's curves [seeds, steps]."""
    band, finite = band_of(curves), np.isfinite(found)
    deviation = deviation_of(found, curves[0], band) if finite.all() else None
    first = None if finite.all() else int(np.argmin(finite))
    return LossQuality(
        losses=tuple(found[:first].tolist()),
        fp32_losses=tuple(curves[0].tolist()),
        seeds=len(curves),
        band=band.allowed,
        jitter_band=band.jitter,
        fall=band.fall,
        course=deviation.course if deviation else None,
        jitter=deviation.jitter if deviation else None,
        not_finite_step=None if first is None else first + 1,
        no_interval=dict.fromkeys(("loss_final", "loss_deviation"), NO_INTERVAL),
    )


def train(runtime: TrainingRuntime, draw: Draw, steps: int) -> Curve:
    """The losses of so many steps from the first weights; NaN after one that is not finite, where training ends."""
    runtime.restart()
    losses = np.full(steps, np.nan)
    for step in range(steps):
        losses[step] = runtime.step(draw()).loss
        if not np.isfinite(losses[step]):
            break
    return losses


def _require_same_weights(runtime: TrainingRuntime) -> None:
    weights = runtime.weights()
    if weights is None or weights.trainable is None or weights.parameters is None:
        return
    if weights.trainable < weights.parameters:
        raise OptiGPUError(
            f"This stack trains {weights.trainable} weights and fp32 all {weights.parameters}, so that their losses "
            "are meant to differ; compare it with a stack that trains the same weights."
        )


def _open(folder: Path, setting: LossSetting) -> NDArray[np.float64]:
    if not (folder / _SETTING).is_file():
        raise missing_reference(folder)
    if LossSetting.model_validate_json((folder / _SETTING).read_bytes()) != setting:
        raise OptiGPUError(
            "The fp32 losses of this job are of another workload or model; submit this variant as a separate job."
        )
    curves: NDArray[np.float64] = np.load(folder / _CURVES, allow_pickle=False)
    return curves
