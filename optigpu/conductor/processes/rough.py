"""A variant's first figures, shown as soon as its process has run a short request; no result is made of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from optigpu.child.messages import Metered
from optigpu.documents.events import RoughlyMeasured
from optigpu.documents.result import Rough
from optigpu.job.spec import Variant
from optigpu.statistics.compare import PROCESSES_DIFFER
from optigpu.vocabulary import METRICS, Better, Role

ENOUGH = 3
"""From so many pairs on their own spread counts."""
REQUESTS_DIFFER = 0.1
"""Fewer are taken to differ from others by 10% (one standard deviation)."""


@dataclass
class RoughLooks:
    """The rough figures of a job's variants, by their index, told as they come."""

    metric: str
    tell: Callable[[RoughlyMeasured], None]
    found: dict[int, Rough] = field(default_factory=dict)
    baseline_of: dict[int, int | None] = field(default_factory=dict)
    """The variant that each is compared with: None for a baseline, and without one."""
    _baselines: dict[str, int] = field(default_factory=dict)

    def saw(self, variant: Variant, samples: Mapping[str, float], *, tells: bool = True) -> None:
        """A request gave these samples. The first one is told at once, if it `tells`, and later ones replace it."""
        value = samples.get(self.metric, 0.0)
        if not 0 < value < math.inf:
            return
        if variant.role is Role.BASELINE:
            self._baselines.setdefault(variant.workload_digest, variant.index)
        found = self._baselines.get(variant.workload_digest)
        self.baseline_of[variant.index] = None if found == variant.index else found
        is_first = tells and variant.index not in self.found
        ci = _interval(math.log(value), math.hypot(REQUESTS_DIFFER, PROCESSES_DIFFER))
        rough = self.found.get(variant.index) or Rough(metric=self.metric, value=value, ci=ci)
        self.found[variant.index] = rough.model_copy(update={"value": value, "ci": ci})
        if is_first:
            self.told(variant.index)

    def told(self, index: int, **known: object) -> None:
        """Tells a variant's figures, with those that are `known` by now, if it has any."""
        if index in self.found:
            self.found[index] = self.found[index].model_copy(update=known)
            self.tell(RoughlyMeasured(index=index, rough=self.found[index]))

    def beside(self, index: int, pairs: Sequence[tuple[float, float]]) -> None:
        """Tells the ratio by requests that followed each other: one of the baseline, then one of the variant."""
        sign = 1 if METRICS[self.metric].better is Better.HIGHER else -1
        gains = [
            sign * math.log(ours / theirs)
            for theirs, ours in pairs
            if 0 < theirs < math.inf and 0 < ours < math.inf
        ]
        if not gains:
            return
        spread = variance(gains) if len(gains) >= ENOUGH else 2 * REQUESTS_DIFFER**2
        error = math.sqrt(spread / len(gains) + 2 * PROCESSES_DIFFER**2)
        self.told(index, ratio=math.exp(fmean(gains)), ratio_ci=_interval(fmean(gains), error))

    def read(self, index: int, quality: Metered) -> None:
        """The quality of the first tokens was read."""
        if "kld_mean" in quality.values:
            self.told(index, **{name: quality.values.get(name) for name in ("kld_mean", "top1_agreement")})


def _interval(centre: float, error: float) -> tuple[float, float]:
    return math.exp(centre - 1.96 * error), math.exp(centre + 1.96 * error)
