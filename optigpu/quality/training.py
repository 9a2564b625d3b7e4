"""The losses of training from the first step on, and those of the fp32 model, the reference of a job.

All curves begin with the same weights. fp32 is trained with several seeds, that is with other samples, which shows how
much a course depends on chance; a variant is trained on the samples of the first seed.
docs/decisions/0027-loss-equivalence.md has the reasons.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.training import TrainingBatch, TrainingRuntime
from optigpu.documents.facts import LossQuality
from optigpu.quality.reference import keep_array, kept_array
from optigpu.statistics.estimates import t_quantile
from optigpu.vocabulary import Frozen, OptiGPUError

Curve = NDArray[np.float64]
"""Losses in the order of the steps, [steps], in nats."""

WINDOWS = 4
"""The parts of a curve whose means are compared: its course without the noise of single steps."""
CONFIDENCE = 0.975
"""One-sided, of the band in which the course of another seed lies in 95% of cases."""
EQUIVALENT = 0.03
"""A difference of less than this share of what fp32 learned counts as none, however quiet the seeds are."""
JITTER = 0.25
"""The most that a variant's losses may jump about fp32's, as a share of how much two seeds' losses do.

A step that leaves out one of n equal parts of its samples jumps sqrt(1 / (2 n - 2)) times as much: more than a quarter
for up to 9 parts.
"""


@dataclass(frozen=True)
class Band:
    """What chance makes of fp32's own curve, in nats.

    `course`: how far another seed's window means may be from these; `jitter`: how much the losses of two seeds jump
    about each other by the step; `fall`: by how much the loss fell from the first window to the last.
    """

    course: float
    jitter: float
    fall: float

    @property
    def allowed(self) -> float:
        return max(self.course, EQUIVALENT * self.fall)


@dataclass(frozen=True)
class Deviation:
    """How far a variant's curve is from fp32's, each as a share of what is allowed: above 1 is outside of the band."""

    course: float
    jitter: float


def band_of(curves: NDArray[np.float64]) -> Band:
    """The band of fp32's curves [2 or more seeds, steps]. Raises OptiGPUError if a loss is infinite or fell by less
    than it."""
    if not np.isfinite(curves).all():
        raise OptiGPUError(
            "The fp32 model's own loss is not finite after a few steps; ask for a lower learning_rate."
        )
    seeds = len(curves)
    means = window_means(curves)  # [seeds, WINDOWS]
    spread = float(np.sqrt(means.var(axis=0, ddof=1).mean()))
    apart = curves - curves.mean(axis=0)
    each = float(np.sqrt((jitter_of(apart) ** 2).sum() / (seeds - 1)))
    band = Band(
        course=t_quantile(CONFIDENCE, seeds - 1) * spread * float(np.sqrt(1 + 1 / seeds)),
        jitter=float(np.sqrt(2)) * each,
        fall=float((means[:, 0] - means[:, -1]).mean()),
    )
    if band.fall <= band.course:
        raise OptiGPUError(
            f"In {curves.shape[1]} steps the fp32 model's loss changed by {-band.fall:+.3g} nat, and chance alone "
            f"moves it by {band.course:.3g}; ask for more quality.steps, a higher learning_rate or a larger batch."
        )
    return band


def deviation_of(found: Curve, expected: Curve, band: Band) -> Deviation:
    """How far a variant's finite losses are from fp32's over the same samples, [steps]."""
    apart = found - expected
    jitter = float(jitter_of(apart))
    return Deviation(
        course=float(np.abs(window_means(apart)).max()) / band.allowed,
        jitter=jitter / (JITTER * band.jitter) if jitter else 0.0,  # the band may have width 0
    )


def window_means(curves: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over WINDOWS equal parts of the steps, [..., WINDOWS]; the last part also has the rest."""
    steps = curves.shape[-1]
    bounds = [steps // WINDOWS * part for part in range(WINDOWS)] + [steps]
    parts = [curves[..., begin:end].mean(axis=-1) for begin, end in pairwise(bounds)]
    return np.stack(parts, axis=-1)


def jitter_of(curves: NDArray[np.float64]) -> NDArray[np.float64]:
    """The noise of single steps [...], from the squares of successive differences, which a smooth course hardly moves.

    Source: von Neumann, Kent, Bellinson, Hart, The mean square successive difference, 1941.
    """
    noise: NDArray[np.float64] = np.sqrt((np.diff(curves, axis=-1) ** 2).mean(axis=-1) / 2)
    return noise


_NAME = "losses"
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
    """Trains fp32 with each seed from its first weights. Raises OptiGPUError for losses that tell nothing
    (`band_of`)."""
    seeds = range(setting.seed, setting.seed + setting.seeds)
    curves = np.stack([train(runtime, draws(seed), setting.steps) for seed in seeds])
    band_of(curves)
    keep_array(folder, _NAME, setting, curves)
    return setting


def compare_losses(
    folder: Path, setting: LossSetting, runtime: TrainingRuntime, draws: DrawOf
) -> LossQuality:
    """Trains over the first seed's samples. Raises OptiGPUError without a reference for this setting, or for other
    weights."""
    weights = runtime.weights()
    trained, whole = (weights.trainable, weights.parameters) if weights else (None, None)
    if trained is not None and whole is not None and trained < whole:
        raise OptiGPUError(
            f"This stack trains {trained} weights and fp32 all {whole}, so that their losses are meant to differ; "
            "compare it with a stack that trains the same weights."
        )
    differs = (
        "The fp32 losses of this job are of another workload or model; submit this variant as a separate job."
    )
    curves = np.load(kept_array(folder, _NAME, setting, differs), allow_pickle=False)
    return quality_of(train(runtime, draws(setting.seed), setting.steps), curves)


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
