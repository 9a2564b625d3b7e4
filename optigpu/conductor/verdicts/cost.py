"""What disturbances can have cost a result's figures at most.

Of each request that figures come from, the counters say what share of its time it can have lost; without that share it
would have been so much faster, and so would the median. Nothing is said where the rounds are clean.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts.disturbance import Disturbance, Lost, Selection, allowed_cores, crowded
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.documents.result import MetricSummary
from optigpu.documents.rounds import RoundMark, RoundRecord
from optigpu.statistics.changes import Array
from optigpu.vocabulary import METRICS, Better

RANKED_UP_TO = 0.30
"""A result is ranked while disturbances can have cost at most this share of its speed."""
JUDGED_FROM_S, LEAST_LOST_S = 0.5, 0.1
"""Shorter rounds of a replicate, all together, and less lost time are not judged by counters: the kernel's ticks are a
large share of them."""
SAID_SHARE = 0.2
"""A kind of disturbance is named if it took this share of what all kinds took."""
MOST = 0.95
"""Beyond this share a cost is taken to have no bound."""


@dataclass(frozen=True)
class Evidence:
    """One replicate, by its number from 1, with the rounds that its figures come from."""

    number: int
    replicate: Replicate
    selection: Selection

    @cached_property
    def records(self) -> tuple[RoundRecord, ...]:
        """The rounds that figures come from."""
        return tuple(record for record in self.selection.records if record.counted)

    @cached_property
    def samples(self) -> tuple[HostSample, ...]:
        """What happened during these."""
        both = zip(self.selection.host_samples, self.selection.records, strict=True)
        return tuple(sample for sample, record in both if record.counted)

    @cached_property
    def lost(self) -> Lost:
        """Seconds of those rounds that each kind of disturbance took."""
        found = [self.selection.yardstick.lost(sample) for sample in self.samples]
        return Lost(*map(sum, zip(*map(astuple, found), strict=True)))

    @property
    def wall_s(self) -> float:
        return sum(sample.wall_s for sample in self.samples)

    @cached_property
    def is_disturbed(self) -> bool:
        """Whether too few rounds are clean, clean ones together lost more than a quiet host's daemons take, or another
        process never rested."""
        return self.selection.is_disturbed or self.lost_much or self.crowded is not None

    @cached_property
    def crowded(self) -> Disturbance | None:
        return crowded(self.samples) if self.wall_s >= JUDGED_FROM_S else None

    def shows(self, mark: RoundMark, lost_s: float) -> bool:
        """Whether a kind of disturbance is worth naming, by its marks or by the share of all lost time that it has."""
        return self.has(mark) or (self.lost_much and lost_s >= SAID_SHARE * self.lost.total_s)

    @cached_property
    def lost_much(self) -> bool:
        """Whether the rounds together lost more than a quiet host's daemons take."""
        allowed_s = allowed_cores(max((each.cpus for each in self.samples), default=1)) * self.wall_s
        return self.wall_s >= JUDGED_FROM_S and self.lost.total_s > max(allowed_s, LEAST_LOST_S)

    def times(self, name: str) -> Array:
        """A metric's samples that figures come from, as times."""
        return times(name, self.selection.of(self.replicate.samples[name]))

    def counted_bound(self, primary: str) -> float:
        """The share of the median that disturbances can have cost at most, by the counters alone."""
        yardstick = self.selection.yardstick
        is_judged = self.is_disturbed and self.wall_s >= JUDGED_FROM_S
        return self._bound(primary, yardstick.counted_share) if is_judged else 0.0

    def probed_bound(self, primary: str) -> float:
        """The same by counters and probe, of which every change counts."""
        yardstick = self.selection.yardstick

        def share(sample: HostSample) -> float:
            return max(yardstick.counted_share(sample), 1 - 1 / max(1.0, yardstick.slowness(sample) or 1.0))

        return self._bound(primary, share)

    def has(self, mark: RoundMark) -> bool:
        """Whether figures come from a round with this mark."""
        return any(mark in record.marks for record in self.records)

    def of_requests(self, of_rounds: Sequence[float]) -> Array:
        """For each request that figures come from, the number of its round."""
        return np.repeat(of_rounds, [record.requests for record in self.records])

    def _bound(self, primary: str, share: Callable[[HostSample], float]) -> float:
        found = self.times(primary)
        shares = self.of_requests([share(sample) for sample in self.samples])
        return float(1 - np.median(found * (1 - shares)) / np.median(found))


def bound_of(primary: str, evidence: Sequence[Evidence]) -> float:
    """The share of a result's speed that disturbances can have cost at most. A probe always varies a little; that
    counts once it varies so much that it marks a round."""
    probed = any(each.has(RoundMark.SLOW_PROBE) for each in evidence)
    return together(
        [each.probed_bound(primary) if probed else each.counted_bound(primary) for each in evidence]
    )


def times(name: str, samples: Iterable[float]) -> Array:
    """A metric's samples as times, [requests]: a rate counts by its inverse."""
    values = np.fromiter(samples, dtype=np.float64)
    return values if METRICS[name].better is Better.LOWER else 1 / values


def together(bounds: Sequence[float]) -> float:
    """The bound of a value that is the mean over processes: that of a rate, which is above that of a time."""
    if max(bounds) > MOST:
        return 1.0
    return 1 - len(bounds) / sum(1 / (1 - bound) for bound in bounds)


def widened(
    metrics: Mapping[str, MetricSummary], bounds: Mapping[str, float | None]
) -> dict[str, MetricSummary]:
    """The summaries, of which those with a bound reach to where they would be undisturbed, and those whose bound is
    None, which nobody knows, have no interval."""
    found = dict(metrics)
    for name, bound in bounds.items():
        if name not in metrics or bound == 0:
            continue
        ci, is_time = metrics[name].ci, metrics[name].better is Better.LOWER
        if ci is None or bound is None:
            ci = None
        else:
            ci = (ci[0] * (1 - bound), ci[1]) if is_time else (ci[0], ci[1] / (1 - bound))
        found[name] = metrics[name].model_copy(update={"ci": ci, "cost_bound": bound})
    return found
