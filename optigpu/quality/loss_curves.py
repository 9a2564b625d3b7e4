"""Whether training took the same course as fp32's: two curves of losses against the noise between seeds.

All curves begin with the same weights. fp32 is trained with several seeds, that is with other samples, which shows how
much a course depends on chance. A variant is trained on the samples of the first seed, so that the difference of its
losses and fp32's owes nothing to the samples. docs/decisions/0027-loss-equivalence.md has the reasons.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from optigpu.statistics.student import t_quantile
from optigpu.vocabulary import OptiGPUError

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

    `course` is how far another seed's window means may be from these, `jitter` how much the losses of two seeds jump
    about each other from step to step, and `fall` by how much the loss fell from the first window to the last.
    """

    course: float
    jitter: float
    fall: float

    @property
    def allowed(self) -> float:
        """How far a variant's window means may be from fp32's."""
        return max(self.course, EQUIVALENT * self.fall)


@dataclass(frozen=True)
class Deviation:
    """How far a variant's curve is from fp32's, each as a share of what is allowed: above 1 is outside of the band."""

    course: float
    jitter: float


def band_of(curves: NDArray[np.float64]) -> Band:
    """The band of fp32's curves, [seeds, steps], of at least two seeds.

    Raises OptiGPUError if a loss is not finite, or if the loss fell by less than the band is wide: then no course is to
    be seen.
    """
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
    return Deviation(
        course=float(np.abs(window_means(apart)).max()) / band.allowed,
        jitter=_share(float(jitter_of(apart)), JITTER * band.jitter),
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


def _share(part: float, whole: float) -> float:
    """No jitter at all is within a band of width 0."""
    return part / whole if part else 0.0
