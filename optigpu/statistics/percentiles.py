"""Percentiles of requests, for each process and then over processes, with an upper bound where one holds.

A process's percentile is estimated by definition 8 of Hyndman and Fan (Sample Quantiles in Statistical Packages, 1996),
which has no bias where requests are independent. A variant's is the mean of logarithms over its processes. Its bound is
the one-sided 95% bound by Student's t over the processes, so that it speaks of others too. One process has no bound.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from optigpu.statistics.estimates import mean_of
from optigpu.statistics.student import Array
from optigpu.statistics.within import FEWEST_REQUESTS, dependence, sorted_quantile

PERCENTILES = (50, 90, 95, 99)
BOUNDED = (90, 95, 99)
_RISK, _BOUND_RISK = 0.01, 0.05


@lru_cache
def fewest_for(percent: int, risk: float = _RISK) -> int:
    """The least number of requests with which a percentile is reported: 11, 64, 130 and 662 for p50 to p99.

    From so many on, a value below the largest bounds the percentile from above with a confidence of 1 - `risk` (David
    and Nagaraja, Order Statistics, 2003, section 7.1).
    """
    return next(n for n in range(2, 10_000) if _fewer_than_two_above(n, percent / 100) <= risk)


def process_percentile(requests: Array, share: float, alike: Array | float) -> Array:
    """The percentile of each process's `requests` [..., requests], by definition 8.

    It takes them for as many as they are worth, so many in a row counting as one.
    """
    place = share + (share / 3 - 1 / 6) * np.asarray(alike) / requests.shape[-1]
    return sorted_quantile(np.sort(requests, axis=-1), place)


def percentiles_of(processes: Sequence[Array]) -> dict[str, object]:
    """The fields p50 to p99_upper and `reason` of a MetricSummary, of positive times."""
    every, fewest = sum(map(len, processes)), min(map(len, processes))
    known = [
        percent
        for percent in PERCENTILES
        if every >= fewest_for(percent) and fewest >= _least_inside(percent)
    ]
    alike = alike_of(processes) or 1.0
    logs = {
        percent: np.log([process_percentile(process, percent / 100, alike) for process in processes])
        for percent in known
    }
    found: dict[str, object] = {f"p{percent}": math.exp(each.mean()) for percent, each in logs.items()}
    bounded, why_not = _bounded(processes, [percent for percent in BOUNDED if percent in known], alike)
    for percent in bounded:
        found[f"p{percent}_upper"] = math.exp(min(float(mean_of(logs[percent]).upper()), 700.0))
    reasons = [why_not] if why_not else []
    if unknown := [percent for percent in PERCENTILES if percent not in known]:
        reasons.insert(0, f"Percentiles need more than {every} requests: {_needs(unknown)}.")
    return found | ({"reason": " ".join(reasons)} if reasons else {})


def alike_of(processes: Sequence[Array]) -> float | None:
    """How many requests in a row count as one, averaged over processes; None where one has too few to say."""
    if min(map(len, processes)) < FEWEST_REQUESTS:
        return None
    return max(1.0, float(np.mean([dependence(process) for process in processes])))


def _bounded(processes: Sequence[Array], wanted: list[int], alike: float) -> tuple[list[int], str | None]:
    """Those of the percentiles that have an upper bound, and why others have none."""
    if not wanted or len(processes) < 2:
        return [], "Upper bounds of percentiles need 2 processes or more." if wanted else None
    fewest = min(map(len, processes))
    count = int(fewest / alike)
    bounded = [
        percent
        for percent in wanted
        if fewest >= fewest_for(percent) and count >= fewest_for(percent, _BOUND_RISK)
    ]
    missing = [percent for percent in wanted if percent not in bounded]
    if not missing:
        return bounded, None
    resemble = f" (they resemble each other and count as {count})" if 2 * count < fewest else ""
    return bounded, (
        f"Upper bounds of percentiles need more than the {fewest} requests of one process{resemble}: "
        f"{_needs(missing)}."
    )


def _least_inside(percent: int) -> int:
    """The least number of requests of a process whose estimated percentile is not simply the largest."""
    share = percent / 100
    return math.ceil((1 + share) / (3 * (1 - share)) - 1e-9)


def _fewer_than_two_above(n: int, share: float) -> float:
    """The probability that fewer than two of `n` values lie above their process's percentile."""
    return share**n + n * (1 - share) * share ** (n - 1)


def _needs(percents: Sequence[int]) -> str:
    return ", ".join(f"p{percent} {fewest_for(percent)}" for percent in percents)
