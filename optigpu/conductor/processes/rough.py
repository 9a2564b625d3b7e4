"""A variant's first figures, shown as soon as its process has run a request; no result is made of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from optigpu.child.messages import Metered, Ready
from optigpu.documents.events import RoughlyMeasured
from optigpu.documents.result import Rough
from optigpu.job.spec import Variant
from optigpu.statistics.compare import PROCESSES_DIFFER
from optigpu.vocabulary import METRICS, Better, Role

LAST = 3
"""The requests of a warm-up that count: the last ones."""
REQUESTS_DIFFER = 0.1
"""Fewer requests than LAST are taken to differ from others by 10% (one standard deviation)."""


@dataclass
class RoughLooks:
    """The rough figures of a job's variants, by their index, told as they come."""

    metric: str
    tell: Callable[[RoughlyMeasured], None]
    found: dict[int, Rough] = field(default_factory=dict)
    _values: dict[int, list[float]] = field(default_factory=dict)
    _baselines: dict[str, int] = field(default_factory=dict)
    baseline_of: dict[int, int | None] = field(default_factory=dict)
    _disturbed: set[int] = field(default_factory=set)

    def saw(self, variant: Variant, samples: Mapping[str, float]) -> None:
        """A request of the warm-up gave these samples; the first one is told at once."""
        value = samples.get(self.metric, 0.0)
        if not 0 < value < math.inf:
            return
        if variant.role is Role.BASELINE:
            self._baselines.setdefault(variant.workload_digest, variant.index)
        found = self._baselines.get(variant.workload_digest)
        self.baseline_of[variant.index] = None if found == variant.index else found
        values = self._values.setdefault(variant.index, [])
        values.append(value)
        if len(values) == 1:
            self._tell(variant.index, self._rough(variant.index))

    def ready(self, variant: Variant, ready: Ready, *, disturbed: bool = False) -> None:
        """The warm-up has ended. Its ratio is told unless others were at work during it, or during the baseline's."""
        index, weights = variant.index, ready.facts.weights
        self._disturbed |= {index} if disturbed else set()
        if index not in self._values:
            return
        rough, baseline = self._rough(index), self.baseline_of[index]
        rough = rough.model_copy(update={"weight_bytes": weights.bytes if weights else None})
        if baseline is not None and self._disturbed.isdisjoint((index, baseline)):
            rough = self._compared(rough, self._values[baseline], self._values[index])
        self._tell(index, rough)

    def beside(self, index: int, theirs: float, ours: float) -> None:
        """A request of the baseline, then one of a variant right after it: their ratio counts."""
        self._tell(index, self._compared(self.found[index], [theirs], [ours]))

    def read(self, index: int, quality: Metered) -> None:
        """The quality of the first tokens was read."""
        if index in self.found and "kld_mean" in quality.values:
            update = {name: quality.values.get(name) for name in ("kld_mean", "top1_agreement")}
            self._tell(index, self.found[index].model_copy(update=update))

    def _tell(self, index: int, rough: Rough) -> None:
        self.found[index] = rough
        self.tell(RoughlyMeasured(index=index, rough=rough))

    def _rough(self, index: int) -> Rough:
        centre, error = _logarithm(self._values[index])
        return Rough(metric=self.metric, value=math.exp(centre), ci=_interval(centre, error))

    def _compared(self, rough: Rough, theirs: Sequence[float], ours: Sequence[float]) -> Rough:
        """With the ratio to the baseline, by requests of both."""
        (before, its_error), (after, error) = map(_logarithm, (theirs, ours))
        gain = after - before if METRICS[self.metric].better is Better.HIGHER else before - after
        bounds = _interval(gain, math.hypot(error, its_error))
        return rough.model_copy(update={"ratio": math.exp(gain), "ratio_ci": bounds})


def _logarithm(values: Sequence[float]) -> tuple[float, float]:
    """The mean logarithm of the last requests' values, and its standard error, that of processes included."""
    last = [math.log(value) for value in values[-LAST:]]
    spread = variance(last) if len(last) == LAST else REQUESTS_DIFFER**2
    return fmean(last), math.sqrt(spread / len(last) + PROCESSES_DIFFER**2)


def _interval(centre: float, error: float) -> tuple[float, float]:
    return math.exp(centre - 1.96 * error), math.exp(centre + 1.96 * error)
