"""What a replicate's own samples show: outputs that were cached, requests that stood still, a speed that changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from optigpu.conductor.verdicts.cost import Evidence, times
from optigpu.conductor.verdicts.disturbance import Disturbance
from optigpu.statistics.changes import Array, drift

CACHED_RATIO = 1.5
"""A request with fresh inputs may take this many times as long as a repeated one."""
CACHED_PAIRS = 8
"""If so many fresh requests, in turns with repeated ones, are all slower than all of these but one, that is no chance:
it happens less than once in a thousand audits, even where half of the requests are slow. One may have stood still."""
AFTER_A_PAUSE = 3
"""The first requests of a round follow a pause, as the audit's do."""
DRIFT_FROM_S = 15.0
"""Of rounds, all replicates together: a virtual machine's speed varies by half within seconds."""
STOPPED_RATIO, STOPPED_S = 20.0, 1.0
"""A request that takes this many times the median, and this many seconds more, was stopped from outside."""
EXPLAINED_SHARE = 0.5
"""A stop is explained where what disturbed its round can have cost this share of it."""
_FASTEST = 0.05
_MOST_LOST = 0.95


def stop(evidence: Evidence) -> tuple[Disturbance, float] | None:
    """The longest request that stood still and that nothing else explains, and the share of a figure that it cost."""
    replicate = evidence.replicate
    if len(replicate.request_s) == sum(replicate.rounds):
        seconds: Array = np.asarray(evidence.selection.of(replicate.request_s))
    elif "latency_s" in replicate.samples:
        seconds = evidence.times("latency_s")
    else:
        return None
    # For each request, the seconds that its whole round can have lost.
    lost_s = evidence.of_requests([record.lost * record.seconds for record in evidence.records])
    typical_s = float(np.median(seconds))
    stopped = (seconds > STOPPED_RATIO * typical_s) & (seconds - typical_s > STOPPED_S)
    unexplained = stopped & (EXPLAINED_SHARE * (seconds - typical_s) > lost_s)
    if not unexplained.any():
        return None
    longest_s = float(seconds[unexplained].max() - typical_s)
    found = Disturbance(
        f"A request stood still for {longest_s:.1f} s",
        "do not stop or debug the measuring process, and measure again",
    )
    costs = [
        float(1 - min(1.0, np.median(values[~stopped]) / np.median(values)))
        for values in map(evidence.times, replicate.samples)
    ]
    return found, max(costs)


@dataclass(frozen=True)
class Drift:
    """How the last third's requests differ from the first's, relative to these."""

    change: float
    # The share of the figure that is gone relative to the fastest twentieth of all requests.
    cost: float

    @property
    def share(self) -> float:
        """The share of the speed by which the slower of the two thirds is behind the other."""
        return 1 - min(1 + self.change, 1 / (1 + self.change))


def drifted(primary: str, evidence: Sequence[Evidence]) -> Drift | None:
    """A lasting change of the speed; None where there is none. Over all replicates in their order: a change that ends
    within one of them is part of the interval. What disturbed the rounds may explain it: then it is gone, or smaller,
    without the time that this can have cost."""
    if sum(each.wall_s for each in evidence) < DRIFT_FROM_S:
        return None
    raw = np.concatenate([each.times(primary) for each in evidence])
    shares = np.concatenate([each.of_requests([record.lost for record in each.records]) for each in evidence])
    found = drift(raw), drift(raw * (1 - np.minimum(shares, _MOST_LOST)))
    if found[0] is None or found[1] is None or found[0] * found[1] < 0:
        return None
    cost = 1 - float(np.quantile(raw, _FASTEST) / np.median(raw))
    return Drift(min(found[0], found[1], key=abs), cost)


def cached(primary: str, evidence: Evidence) -> Disturbance | None:
    """Even the fastest request with fresh inputs took much longer than the repeated ones. It is compared with the
    slowest of the rounds that figures come from, with the first requests of a round, and with repeated requests
    between the fresh ones, if there are any. What disturbed the audit may explain it, unless so many pairs say the
    same that this is no chance."""
    audit = evidence.replicate.audit
    for name in dict.fromkeys(("latency_s", "ttft_s", primary)):
        if audit is None or not audit.samples.get(name) or name not in evidence.replicate.samples:
            continue
        fresh, between = times(name, audit.samples[name]), times(name, audit.repeated.get(name, ()))
        enough = min(len(fresh), len(between)) >= CACHED_PAIRS
        repeated = max((_slowest_round(evidence, name), *np.sort(between)[: -1 if enough else None]))
        left = 1.0 if enough else _undisturbed(evidence, fresh, between)
        if fresh.min() * left > CACHED_RATIO * repeated:
            return Disturbance(
                f"Requests with fresh inputs took at least {fresh.min() / repeated:.1f} times as long as "
                f"repeated ones ({name})",
                "outputs were cached: disable the cache",
            )
    return None


def _slowest_round(evidence: Evidence, name: str) -> float:
    values = times(name, evidence.replicate.samples[name])
    rounds = np.split(values, list(accumulate(evidence.replicate.rounds))[:-1])
    counted = [
        each for each, record in zip(rounds, evidence.selection.records, strict=True) if record.counted
    ]
    return max(max(float(np.median(each)), float(each[:AFTER_A_PAUSE].min())) for each in counted)


def _undisturbed(evidence: Evidence, fresh: Array, between: Array) -> float:
    """The share of the fresh requests' time that would be left if all that disturbed the audit had hit them alone."""
    sample, yardstick = evidence.replicate.audit_sample, evidence.selection.yardstick
    if sample is None or sample.wall_s <= 0:
        return 1.0
    fresh_s = sample.wall_s * float(fresh.sum() / (fresh.sum() + between.sum()))
    return max(0.0, 1 - yardstick.lost(sample).total_s / fresh_s) / yardstick.slow(sample)
