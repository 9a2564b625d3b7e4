"""A variant's first figures, shown as soon as its process has run a short request; no result is made of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from optigpu.child.messages import Metered
from optigpu.documents.events import RoughlyMeasured
from optigpu.documents.result import Rough
from optigpu.job.spec import Variant
from optigpu.statistics.compare import PROCESSES_DIFFER
from optigpu.vocabulary import METRICS, Better, Role

REQUESTS_DIFFER = 0.1
"""A short request is taken to differ from others by 10% (one standard deviation), and by what its steps differ by."""
QUARTILES_APART = 1.349
"""Of a normal distribution, in standard deviations."""
OF_A_MEDIAN = 1.253
"""The standard error of a normal sample's median over that of its mean."""


@dataclass
class RoughLooks:
    """The rough figures of a job's variants, by their index, told as they come."""

    metric: str
    tell: Callable[[RoughlyMeasured], None]
    found: dict[int, Rough] = field(default_factory=dict)
    baseline_of: dict[int, int | None] = field(default_factory=dict)
    """The variant that each is compared with: None for a baseline, and without one."""
    _baselines: dict[str, int] = field(default_factory=dict)

    def saw(self, variant: Variant, samples: Mapping[str, float]) -> None:
        """A request of the warm-up gave these samples. The first one is told at once, and later ones replace it."""
        is_first = variant.index not in self.found
        self.looked(variant, (samples.get(self.metric, 0.0),))
        if is_first:
            self.told(variant.index)

    def looked(self, variant: Variant, values: Sequence[float]) -> None:
        """A short request gave these values of the metric, one for each of its steps."""
        if not _are_valid(values):
            return
        if variant.role is Role.BASELINE:
            self._baselines.setdefault(variant.workload_digest, variant.index)
        found = self._baselines.get(variant.workload_digest)
        self.baseline_of[variant.index] = None if found == variant.index else found
        centre, error = _logarithm([values])
        known = {"value": math.exp(centre), "ci": _interval(centre, error)}
        rough = self.found.get(variant.index) or Rough(metric=self.metric, **known)
        self.found[variant.index] = rough.model_copy(update=known)

    def told(self, index: int, **known: object) -> None:
        """Tells a variant's figures, with those that are `known` by now, if it has any."""
        if index in self.found:
            self.found[index] = self.found[index].model_copy(update=known)
            self.tell(RoughlyMeasured(index=index, rough=self.found[index]))

    def beside(self, index: int, theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> None:
        """Tells the ratio by short requests of the baseline and of the variant that took turns."""
        if not all(map(_are_valid, (*theirs, *ours))):
            return
        (before, its_error), (after, error) = _logarithm(theirs), _logarithm(ours)
        gain = after - before if METRICS[self.metric].better is Better.HIGHER else before - after
        bounds = _interval(gain, math.hypot(error, its_error))
        self.told(index, ratio=math.exp(gain), ratio_ci=bounds)

    def read(self, index: int, quality: Metered) -> None:
        """The quality of the first tokens was read."""
        if "kld_mean" in quality.values:
            self.told(index, **{name: quality.values.get(name) for name in ("kld_mean", "top1_agreement")})


def _are_valid(values: Sequence[float]) -> bool:
    return bool(values) and all(0 < value < math.inf for value in values)


def _logarithm(requests: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The median logarithm of the values of all requests, and its standard error, with what processes differ by. The
    steps of a request are not independent: they count as one."""
    logs = [math.log(value) for values in requests for value in values]
    lower, _, upper = quantiles(logs, n=4) if len(logs) > 1 else (0.0, 0.0, 0.0)
    spread = math.hypot((upper - lower) / QUARTILES_APART, REQUESTS_DIFFER)
    return median(logs), math.hypot(OF_A_MEDIAN * spread / math.sqrt(len(requests)), PROCESSES_DIFFER)


def _interval(centre: float, error: float) -> tuple[float, float]:
    return math.exp(centre - 1.96 * error), math.exp(centre + 1.96 * error)
