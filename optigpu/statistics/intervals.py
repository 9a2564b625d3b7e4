"""Estimates from samples: a variant's value, its interval, its percentiles, and ratios. Closed forms, no resampling.

Each process counts once, by the median of its requests. A variant's value is the geometric mean of those medians, so
that a ratio of values is the value of the ratios; where a median is zero or negative, it is their plain mean. Its 95%
interval is

- several processes: Student's t over the processes' medians, on the same scale.
- one process: the interval of that process's own median, corrected for the correlation of its requests
  (`optigpu.statistics.within`). It says nothing about other processes.

A ratio's interval is Welch's t over the logarithms, and Student's t over the pairs' differences where processes were
measured side by side. Where these took short turns, a pair's ratio is that of its turns (`optigpu.statistics.within`).

A process's percentile is estimated by definition 8 of Hyndman and Fan (Sample Quantiles in Statistical Packages, 1996);
a variant's is the mean of logarithms over its processes. Its bound is the one-sided 95% bound by Student's t over the
processes, so that it speaks of others too. One process has no bound.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from optigpu.documents.result import Measurement, MetricSummary, Samples
from optigpu.statistics.estimates import FURTHEST, Array, Bounds, Estimate, difference, factor_bounds, mean_of
from optigpu.statistics.within import (
    FEWEST_FOR_INTERVAL,
    FEWEST_REQUESTS,
    dependence,
    freedom_of,
    median_bounds,
    median_error,
    sorted_quantile,
)
from optigpu.vocabulary import METRICS, Better

MOST_UNEQUAL = 2
"""Between sides one of which has twice the processes of the other, or more, the interval would not hold."""


def summarise(measurement: Measurement) -> MetricSummary:
    """The summary of a measurement. Times of requests also get percentiles. Where an interval, a percentile or its
    bound is null, `reason` says what it needs."""
    metric = METRICS[measurement.name]
    samples = _filled(measurement.samples)
    if not samples:
        return MetricSummary(unit=metric.unit, value=None, better=metric.better, reason=measurement.reason)
    every = np.concatenate(samples)
    medians = _medians(samples)
    of_requests = len(every) > len(samples)
    alike = alike_of(samples)
    freedom = len(samples) - 1.0 if len(samples) > 1 else None
    if freedom is None and len(every) >= FEWEST_FOR_INTERVAL:
        freedom = float(freedom_of(len(every)))
    within = [variation for process in samples if (variation := _variation(process)) is not None]
    summary = MetricSummary(
        unit=metric.unit,
        value=value_of(measurement.samples),
        ci=interval(measurement.samples),
        freedom=freedom,
        n=len(every),
        n_effective=len(every) / len(samples) / alike if alike else None,
        replicates=len(samples),
        better=metric.better,
        mean=float(every.mean()),
        cv_within=math.fsum(within) / len(within) if within else None,
        cv_between=_variation(medians),
        per_replicate=tuple(medians.tolist()),
        reason=_no_interval(samples) if of_requests else None,
    )
    if metric.unit != "s" or metric.better is not Better.LOWER or not of_requests or every.min() <= 0:
        return summary
    found = percentiles_of(samples)
    reasons = " ".join(str(each) for each in (summary.reason, found.pop("reason", None)) if each)
    return summary.model_copy(update=found | {"reason": reasons or None})


def describe(values: Sequence[float]) -> dict[str, float]:
    """Count, quantiles and extremes, for values that are neither independent nor exchangeable."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    quantiles = {f"p{percent}": float(np.quantile(ordered, percent / 100)) for percent in PERCENTILES}
    return {"n": len(ordered), **quantiles, "min": float(ordered[0]), "max": float(ordered[-1])}


def value_of(samples: Samples) -> float:
    """The mean over processes of the median over requests, geometric where all medians are positive. Raises ValueError
    when there are no samples."""
    medians = _medians(_filled(samples))
    if not len(medians):
        raise ValueError("there are no samples to summarise")
    if medians.min() == medians.max():
        # What was counted stays exact: a logarithm and back would round it.
        return float(medians[0])
    if medians.min() > 0:
        return math.exp(math.fsum(np.log(medians)) / len(medians))
    return math.fsum(medians) / len(medians)


def interval(samples: Samples) -> Bounds | None:
    """The 95% interval of `value_of`, or None where one process has too few requests for any. It never reaches below
    zero where no sample does."""
    processes = _filled(samples)
    found = _over_processes(processes) if len(processes) > 1 else _of_process(processes[0])
    least = min(float(process.min()) for process in processes)
    return (max(found[0], 0.0), found[1]) if found and least >= 0 else found


def ratio(numerator: Samples, denominator: Samples) -> tuple[float, Bounds | None]:
    """The ratio of two values with its 95% interval, the processes of one side being independent of the other's.

    It has no interval where one process has too few requests, or one side has twice the other's processes.
    Raises ValueError when a sample is not positive, or when there are none.
    """
    quotient, sides = _sides(numerator, denominator)
    above, below = (_logarithm(side) for side in sides)
    if above is None or below is None or not comparable(len(sides[0]), len(sides[1])):
        return quotient, None
    return quotient, factor_bounds(quotient, difference(above, below))


def paired_ratio(
    numerator: Samples, denominator: Samples, of_turns: Sequence[float] = ()
) -> tuple[float, Bounds | None]:
    """The ratio of two values that were measured side by side, replicate by replicate, with its 95% interval.

    It is over the pairs of processes: what disturbed both of a pair alike leaves their ratio alone. Without several
    whole pairs, as `ratio`. Where turns say the ratio of each pair (`of_turns`), it is the mean of these; that of a
    single pair has the interval of `ratio` around it.

    Raises ValueError when a sample is not positive, or when there are none.
    """
    if len(of_turns) > 1:
        logarithm = mean_of(np.log(of_turns))
        quotient = math.exp(float(logarithm.centre))
        return quotient, factor_bounds(quotient, logarithm)
    if of_turns:
        quotient, bounds = ratio(numerator, denominator)
        return of_turns[0], bounds and (
            bounds[0] * of_turns[0] / quotient,
            bounds[1] * of_turns[0] / quotient,
        )
    quotient, (above, below) = _sides(numerator, denominator)
    if len(above) != len(below) or len(above) < 2:
        return ratio(numerator, denominator)
    return quotient, factor_bounds(quotient, mean_of(np.log(_medians(above)) - np.log(_medians(below))))


def comparable(processes: int, others: int) -> bool:
    """Whether two independent sides of so many processes have an interval; single processes speak of themselves."""
    fewer, more = sorted((processes, others))
    return fewer == 1 or more < MOST_UNEQUAL * fewer


def _sides(numerator: Samples, denominator: Samples) -> tuple[float, tuple[list[Array], list[Array]]]:
    sides = _filled(numerator), _filled(denominator)
    if not all(side and min(process.min() for process in side) > 0 for side in sides):
        raise ValueError("a ratio needs samples, and all of them positive")
    return value_of(numerator) / value_of(denominator), sides


def _logarithm(processes: list[Array]) -> Estimate | None:
    """A value's logarithm; None where one process has too few requests for an interval."""
    if len(processes) > 1:
        return mean_of(np.log(_medians(processes)))
    (requests,) = processes
    if len(requests) < FEWEST_FOR_INTERVAL:
        return None
    centre, error = np.log(np.median(requests)), median_error(np.log(requests))
    return Estimate(np.asarray(centre), error, np.asarray(float(freedom_of(len(requests)))))


def _over_processes(processes: list[Array]) -> Bounds | None:
    medians = _medians(processes)
    if medians.min() > 0:
        return factor_bounds(
            value_of(tuple((median,) for median in medians.tolist())), mean_of(np.log(medians))
        )
    low, high = mean_of(medians).bounds()
    return float(low), float(high)


def _of_process(requests: Array) -> Bounds | None:
    """The interval of one process's own median, which it always contains."""
    if len(requests) < FEWEST_FOR_INTERVAL:
        return None
    positive = requests.min() > 0
    low, high = map(float, median_bounds(np.log(requests) if positive else requests))
    if not positive:
        return low, high
    if max(abs(low), abs(high)) > FURTHEST:
        return None
    median = float(np.median(requests))
    return min(math.exp(low), median), max(math.exp(high), median)


def _filled(samples: Samples) -> list[Array]:
    return [np.asarray(process, dtype=np.float64) for process in samples if len(process)]


def _medians(processes: Sequence[Array]) -> Array:
    return np.array([np.median(process) for process in processes])


def _no_interval(processes: Sequence[Array]) -> str | None:
    if len(processes) > 1 or len(processes[0]) >= FEWEST_FOR_INTERVAL:
        return None
    return (
        f"An interval needs several processes, or {FEWEST_FOR_INTERVAL} requests of one; "
        f"there is one process with {len(processes[0])}."
    )


def _variation(values: Array) -> float | None:
    """Standard deviation (with n - 1) over the mean; None for a single value or a mean of zero."""
    if len(values) < 2 or not values.mean():
        return None
    return float(values.std(ddof=1) / abs(values.mean()))


PERCENTILES = (50, 90, 95, 99)
BOUNDED = (90, 95, 99)
_RISK, _BOUND_RISK = 0.01, 0.05


@lru_cache
def fewest_for(percent: int, risk: float = _RISK) -> int:
    """The least number of requests with which a percentile is reported: 11, 64, 130 and 662 for p50 to p99.

    From so many on, a value below the largest bounds the percentile from above with a confidence of 1 - `risk` (David
    and Nagaraja, Order Statistics, 2003, section 7.1).
    """
    share = percent / 100
    return next(n for n in range(2, 10_000) if share**n + n * (1 - share) * share ** (n - 1) <= risk)


def process_percentile(requests: Array, share: float, alike: Array | float) -> Array:
    """The percentile of each process's `requests` [..., requests], by definition 8, for as many as they are worth, so
    many in a row counting as one."""
    place = share + (share / 3 - 1 / 6) * np.asarray(alike) / requests.shape[-1]
    return sorted_quantile(np.sort(requests, axis=-1), place)


def percentiles_of(processes: Sequence[Array]) -> dict[str, object]:
    """The fields p50 to p99_upper and `reason` of a MetricSummary, of positive times."""
    every, fewest = sum(map(len, processes)), min(map(len, processes))
    known = [
        percent
        for percent in PERCENTILES
        # The estimated percentile of each process must not simply be its largest request.
        if every >= fewest_for(percent)
        and fewest >= math.ceil((100 + percent) / (3 * (100 - percent)) - 1e-9)
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


def _needs(percents: Sequence[int]) -> str:
    return ", ".join(f"p{percent} {fewest_for(percent)}" for percent in percents)
