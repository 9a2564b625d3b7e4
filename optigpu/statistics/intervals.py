"""Estimates from samples: medians, intervals, percentiles with bounds, ratios. Pure numpy.

A variant's value is the mean over its processes of each process's median over requests. Its 95% interval is a
percentile bootstrap on the highest level that has more than one unit:

- several processes: the processes are resampled. Their medians carry the noise of their requests already, and
  resampling those too would count it twice (Davison and Hinkley, Bootstrap Methods and their Application, 1997,
  section 3.8). Deviations are widened by sqrt(P / (P - 1)) * t(P - 1) / z, without which few units make an interval
  that is far too short (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 4.3).
- one process: its requests are resampled; the interval then says nothing about other processes.

A percentile is that of all requests of all processes. Its upper bound is made from each process by itself, and the
highest is shown: with 99% confidence it is above the percentile of every measured process. It says nothing
about other processes, which may differ by more.

Assumed: processes are independent, and the requests of one process are exchangeable (no trend, no autocorrelation).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.result import Measurement, MetricSummary, Samples
from optigpu.vocabulary import METRICS, Better

Array = NDArray[np.float64]

RESAMPLES = 4000
FEWEST_REQUESTS = 6
"""The least number of requests of one process whose range is a 95% interval of its median: 1 - 2 / 2**6 > 0.95."""

PERCENTILES = (50, 90, 95, 99)
_BOUND_RISK = 0.01
_INTERVAL = (0.025, 0.975)
_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's t at 0.975 for 1 to 9 degrees of freedom."""


def summarise(measurement: Measurement, seed: int = 0) -> MetricSummary:
    """The summary of a measurement. Times of requests also get percentiles, and an upper bound for each.

    Where a percentile or its bound is null, `reason` says how many requests it needs.
    """
    metric = METRICS[measurement.name]
    samples = _filled(measurement.samples)
    if not samples:
        return MetricSummary(unit=metric.unit, value=None, better=metric.better, reason=measurement.reason)
    every = np.concatenate(samples)
    medians = [float(np.median(process)) for process in samples]
    times_requests = metric.unit == "s" and metric.better is Better.LOWER and len(every) > len(samples)
    summary = MetricSummary(
        unit=metric.unit,
        value=value_of(measurement.samples),
        ci=interval(measurement.samples, seed),
        n=len(every),
        replicates=len(samples),
        better=metric.better,
        mean=float(every.mean()),
        cv_within=_cv_within(samples),
        cv_between=_variation(np.array(medians)),
        per_replicate=tuple(medians),
    )
    return summary.model_copy(update=_percentiles(samples)) if times_requests else summary


def describe(values: Sequence[float]) -> dict[str, float]:
    """Count, quantiles and extremes, for values that are neither independent nor exchangeable."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    quantiles = {f"p{percent}": float(np.quantile(ordered, percent / 100)) for percent in PERCENTILES}
    return {"n": len(ordered), **quantiles, "min": float(ordered[0]), "max": float(ordered[-1])}


def value_of(samples: Samples) -> float:
    """The mean over processes of the median over requests. Raises ValueError when there are no samples."""
    medians = [float(np.median(process)) for process in _filled(samples)]
    if not medians:
        raise ValueError("there are no samples to summarise")
    return math.fsum(medians) / len(medians)


def interval(samples: Samples, seed: int = 0) -> tuple[float, float] | None:
    """The 95% interval of `value_of`, or None where one process has too few requests for any.

    It never reaches below zero where no sample does.
    """
    processes = _filled(samples)
    if not _enough(processes):
        return None
    value = value_of(samples)
    deviations = _draws(processes, np.random.default_rng(seed)) - value
    low, high = np.quantile(value + _widening(len(processes)) * deviations, _INTERVAL)
    floor = 0.0 if min(process.min() for process in processes) >= 0 else -math.inf
    return max(float(low), floor), float(high)


def relative_width(requests: Sequence[float], seed: int = 0) -> float:
    """Width of one process's 95% interval relative to its median; infinite if it has no interval."""
    bounds = interval((tuple(requests),), seed)
    median = float(np.median(requests)) if requests else 0.0
    return (bounds[1] - bounds[0]) / abs(median) if bounds and median else math.inf


def ratio(
    numerator: Samples, denominator: Samples, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """The ratio of two values with its 95% interval, resampled on a logarithmic scale.

    Raises ValueError when a sample is not positive, or when there are none.
    """
    logs = [
        [np.log(process) for process in _positive(_filled(samples))] for samples in (numerator, denominator)
    ]
    quotient = value_of(numerator) / value_of(denominator)
    if not all(_enough(processes) for processes in logs):
        return quotient, None
    rng = np.random.default_rng(seed)
    above, below = (_log_deviations(processes, rng) for processes in logs)
    low, high = np.quantile(above - below, _INTERVAL)
    return quotient, (quotient * math.exp(low), quotient * math.exp(high))


def paired_ratio(
    numerator: Samples, denominator: Samples, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """The ratio of two values that were measured side by side, replicate by replicate, with its 95% interval.

    The pairs of processes are resampled: what disturbed both of a pair alike leaves their ratio alone. Without several
    whole pairs, as `ratio`. Raises ValueError when a sample is not positive, or when there are none.
    """
    pairs = [_positive(_filled(samples)) for samples in (numerator, denominator)]
    if len(pairs[0]) != len(pairs[1]) or len(pairs[0]) < 2:
        return ratio(numerator, denominator, seed)
    above, below = (np.array([float(np.median(np.log(process))) for process in side]) for side in pairs)
    # Each difference is one process's only sample, so that the resampling of processes is that of pairs.
    deviations = _log_deviations([np.array([each]) for each in above - below], np.random.default_rng(seed))
    low, high = np.quantile(deviations, _INTERVAL)
    quotient = value_of(numerator) / value_of(denominator)
    return quotient, (quotient * math.exp(low), quotient * math.exp(high))


@lru_cache
def upper_bound_rank(n: int, percent: int) -> int | None:
    """The rank (from 1) among `n` sorted samples that bounds a percentile from above with 99% confidence.

    None where only the largest sample would, which says nothing about how far it is: p50 needs 11 samples,
    p90 64, p95 130, p99 662. Source: order statistics, David and Nagaraja, Order Statistics, 2003, section 7.1.
    """
    exceeding = np.flatnonzero(_upper_tail(n, percent / 100) <= _BOUND_RISK)
    rank = int(exceeding[0]) if exceeding.size else n
    return rank if rank < n else None


@lru_cache
def fewest_for(percent: int) -> int:
    """The least number of samples with which a percentile is reported."""
    return next(n for n in range(2, 10_000) if upper_bound_rank(n, percent) is not None)


def _filled(samples: Samples) -> list[Array]:
    return [np.asarray(process, dtype=np.float64) for process in samples if len(process)]


def _enough(processes: Sequence[Array]) -> bool:
    return len(processes) > 1 or len(processes[0]) >= FEWEST_REQUESTS


def _positive(processes: list[Array]) -> list[Array]:
    if not processes or min(process.min() for process in processes) <= 0:
        raise ValueError("a ratio needs samples, and all of them positive")
    return processes


def _draws(processes: Sequence[Array], rng: np.random.Generator) -> Array:
    """Bootstrap values. Shape: [RESAMPLES]."""
    if len(processes) == 1:
        return _resampled_medians(np.sort(processes[0]), rng)
    medians = np.array([np.median(process) for process in processes])
    picked = rng.integers(len(medians), size=(RESAMPLES, len(medians)))
    return np.asarray(medians[picked].mean(axis=1))


def _log_deviations(logs: Sequence[Array], rng: np.random.Generator) -> Array:
    """Widened bootstrap deviations of a value's logarithm. `logs`: each process's samples as logarithms."""
    draws = _draws(logs, rng)
    return _widening(len(logs)) * (draws - np.mean([np.median(process) for process in logs]))


def _resampled_medians(ordered: Array, rng: np.random.Generator) -> Array:
    """Medians of RESAMPLES bootstrap samples of `ordered` [n], in memory that does not grow with n.

    A bootstrap sample is x[floor(n u)] for n uniform u, so its median needs only the middle order statistics of u,
    and those are beta distributed: no resample has to be drawn.
    """
    n = len(ordered)
    rank = (n + 1) // 2
    middle = rng.beta(rank, n + 1 - rank, RESAMPLES)
    lower = ordered[np.minimum((n * middle).astype(np.int64), n - 1)]
    if n % 2:
        return np.asarray(lower)
    after = middle + (1 - middle) * rng.beta(1, n - rank, RESAMPLES)
    return np.asarray((lower + ordered[np.minimum((n * after).astype(np.int64), n - 1)]) / 2)


def _widening(processes: int) -> float:
    if processes == 1:
        return 1.0
    z = NormalDist().inv_cdf(_INTERVAL[1])
    return math.sqrt(processes / (processes - 1)) * _t_quantile(processes - 1) / z


def _t_quantile(freedom: int) -> float:
    """Student's t at 0.975; beyond the table by Cornish and Fisher's expansion, good to 0.0002 there."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = NormalDist().inv_cdf(_INTERVAL[1])
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def _upper_tail(n: int, share: float) -> Array:
    """P(X >= k) for k in 0..n and X binomial(n, share). Shape: [n + 1]."""
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    k = np.arange(n + 1)
    log_mass = log_factorial[n] - log_factorial - log_factorial[::-1]
    log_mass = log_mass + k * math.log(share) + (n - k) * math.log1p(-share)
    return np.asarray(np.exp(log_mass)[::-1].cumsum()[::-1])


def _cv_within(processes: Sequence[Array]) -> float | None:
    """The coefficient of variation within a process, averaged over the processes that have several samples."""
    found = [variation for process in processes if (variation := _variation(process)) is not None]
    return math.fsum(found) / len(found) if found else None


def _variation(values: Array) -> float | None:
    """Standard deviation (with n - 1) over the mean; None for a single value or a mean of zero."""
    if len(values) < 2 or not values.mean():
        return None
    return float(values.std(ddof=1) / abs(values.mean()))


def _percentiles(processes: Sequence[Array]) -> dict[str, object]:
    """The percentiles of all requests and their upper bounds, under the field names of a MetricSummary.

    A bound holds for each process by itself, since requests of one process are alike and those of two are not: it is
    the highest of the processes' own bounds, and needs enough requests in each of them.
    """
    every = np.concatenate(processes)
    fewest = min(map(len, processes))
    known = [percent for percent in PERCENTILES if upper_bound_rank(len(every), percent)]
    bounded = [percent for percent in known if percent > 50 and upper_bound_rank(fewest, percent)]
    found: dict[str, object] = {f"p{percent}": float(np.quantile(every, percent / 100)) for percent in known}
    found |= {f"p{percent}_upper": _highest_bound(processes, percent) for percent in bounded}
    unknown = [percent for percent in PERCENTILES if percent not in known]
    unbounded = [percent for percent in known if percent > 50 and percent not in bounded]
    reasons = []
    if unknown:
        reasons.append(f"Percentiles need more than {len(every)} requests: {_needs(unknown)}.")
    if unbounded:
        reasons.append(
            f"Upper bounds of percentiles need more than the {fewest} requests of one process: {_needs(unbounded)}."
        )
    return found | ({"reason": " ".join(reasons)} if reasons else {})


def _highest_bound(processes: Sequence[Array], percent: int) -> float:
    """The highest of the processes' own upper bounds. Each process must have enough requests for one."""
    ranks = [upper_bound_rank(len(process), percent) for process in processes]
    return max(
        float(np.sort(process)[rank - 1]) for process, rank in zip(processes, ranks, strict=True) if rank
    )


def _needs(percents: Sequence[int]) -> str:
    return ", ".join(f"p{percent} {fewest_for(percent)}" for percent in percents)
