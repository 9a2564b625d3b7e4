"""Whether pairs of runs show a loss beyond a limit. Pure numpy; it works along the last axis.

A pair is a run of each state, one right after the other, in an order that is drawn for each pair. Its loss is the
logarithm of the ratio of its two figures, positive where the head is worse. Where the two states are the same, the sign
of each loss is the toss of a coin, whatever the machine does: drift, neighbours and heavy tails make no false alarm
more frequent. So the signed ranks of the losses are tested (Wilcoxon, Individual Comparisons by Ranking Methods, 1945),
and the interval is that of Hodges and Lehmann (Estimates of Location Based on Rank Tests, 1963).

The losses are looked at after each pair. A sum of such tosses passes a bound at any time at most twice as often as at
its end (Levy's inequality). So the bound of the end, for half the risk, holds for all looks: after k of n planned pairs
it is sqrt(n / k) times as many standard errors. The plan may shrink, when pairs take longer, and never grows.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.gates import GateVerdict
from optigpu.statistics.estimates import Array
from optigpu.statistics.within import middle

LIMIT_ERRORS = 1.960
"""Standard errors between the losses and the limit: 5% of all runs pass it by chance, in whichever look."""
CHANGE_ERRORS = 2.576
"""Standard errors between the losses and no change, before anything is called worse: 1% of all runs."""
FEWEST_PAIRS = 9
"""With fewer not even a loss in each pair is rare enough to be called worse."""
FEWEST_FOR_NOISE = 6
"""With fewer nothing is known of how much losses differ, and nothing can be decided."""
_DRAWN_RUNS, _DRAWN_PAIRS = 400, 64
_UNSEEN = 6.0
"""By simulation (benchmarks/gate.py): with it four of five find what is said to be found, by 12 pairs as by 100."""


@dataclass(frozen=True)
class Loss:
    """The estimate of the losses, their interval, and the smallest loss that the whole of the planned pairs
    would have found four times of five; None where there are too few pairs. All are logarithms."""

    estimate: float
    low: float
    high: float
    findable: float | None

    @property
    def known(self) -> bool:
        """Whether there are enough pairs for an interval."""
        return math.isfinite(self.low)


def verdicts(losses: Array, planned: int, limit: float) -> NDArray[np.int64]:
    """After each of `losses` [..., pairs]: 1 worse than the limit (a logarithm above 0), -1 no worse, 0 neither."""
    wider = np.sqrt(planned / np.arange(1, losses.shape[-1] + 1))
    from_limit, from_none = scores(losses, limit), scores(losses, 0.0)
    worse = (from_limit >= LIMIT_ERRORS * wider) & (from_none >= CHANGE_ERRORS * wider)
    return np.asarray(worse.astype(np.int64) - (from_limit <= -LIMIT_ERRORS * wider))


def verdict_of(losses: Array, planned: int, limit: float) -> GateVerdict:
    """The verdict after the last of `losses` [pairs]."""
    return (GateVerdict.CANNOT_SAY, GateVerdict.WORSE, GateVerdict.NO_WORSE)[
        int(verdicts(losses, planned, limit)[-1])
    ]


def scores(losses: Array, at: float) -> Array:
    """After each pair [..., pairs]: by how many standard errors the signed ranks of all pairs so far lie above `at`."""
    sides = np.sign(losses[..., :, None] + losses[..., None, :] - 2 * at)  # of the mean of every two
    count = np.arange(1, losses.shape[-1] + 1)
    ranks = np.cumsum(np.triu(sides).sum(axis=-2), axis=-1)
    # A rank more or less changes the sum by two: half of that is the correction for continuity.
    return np.asarray(np.sign(ranks) * np.maximum(np.abs(ranks) - 1, 0) / _spread(count))


def chance_of(losses: Array, planned: int) -> float:
    """How often a loss as sure as that of `losses` [pairs] of `planned` pairs is seen at any look, without one."""
    errors = float(scores(losses, 0.0)[-1]) / math.sqrt(planned / len(losses))
    return min(1.0, math.erfc(errors / math.sqrt(2)))  # twice of one side: Levy's inequality


def loss_of(losses: Array, planned: int, limit: float) -> Loss:
    """What `losses` [pairs] of `planned` pairs show."""
    low, high = bounds(losses, LIMIT_ERRORS * math.sqrt(planned / len(losses)))
    return Loss(middle(losses), float(low), float(high), _findable(losses, planned, limit))


def bounds(losses: Array, errors: float) -> tuple[Array, Array]:
    """The interval [...] of `losses` [..., pairs], so many standard errors wide; infinite if pairs are too few."""
    count = losses.shape[-1]
    first, second = np.tril_indices(count)
    means = np.sort((losses[..., first] + losses[..., second]) / 2, axis=-1)
    outside = math.floor((means.shape[-1] - 1 - errors * float(_spread(np.asarray(count)))) / 2)
    if outside < 0:
        none = np.full(losses.shape[:-1], np.inf)
        return -none, none
    return means[..., outside], means[..., means.shape[-1] - 1 - outside]


def _spread(count: NDArray[np.int64]) -> Array:
    return np.asarray(np.sqrt(count * (count + 1) * (2 * count + 1) / 6))


def _findable(losses: Array, planned: int, limit: float) -> float | None:
    """The loss with which four of five runs end as `worse`. The runs are drawn from how much the losses differ, with
    either sign; few pairs show too little of what others would, which is made up for."""
    count = len(losses)
    if count < FEWEST_FOR_NOISE or planned < FEWEST_PAIRS:
        return None
    drawn = min(planned, _DRAWN_PAIRS)
    random = np.random.default_rng(0)
    shape = _DRAWN_RUNS, drawn
    noise = random.choice(losses - middle(losses), shape) * random.choice((-1.0, 1.0), shape)
    noise *= (1 + _UNSEEN / count) * math.sqrt(drawn / planned)
    needed = np.maximum(limit - bounds(noise, LIMIT_ERRORS)[0], -bounds(noise, CHANGE_ERRORS)[0])
    return float(np.quantile(needed, 0.8))
