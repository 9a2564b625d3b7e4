"""How fast the hardware allows a variant to be, and what limits it: memory, compute or launches. Williams et al.,
Roofline, CACM 52(4), 2009.

A step that moves `bytes` and does `flops` takes at least the longer of bytes / bandwidth and flops / rate, the best
that were measured: the bandwidth of an array as large as what the step moves, because a small model's weights come
from a cache, and the rate of the fastest dtype that it multiplies.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from optigpu.documents.facts import RunFacts
from optigpu.documents.peaks import Bound, Peaks, ReadRate, Roof, RooflineFacts, RooflineStep
from optigpu.documents.result import MetricSummary
from optigpu.hardware.catalog import Device, Dtype
from optigpu.roofline.work import VariantWork, Work, work_of
from optigpu.vocabulary import METRICS, Better, Task, UnsupportedError
from optigpu.workloads.base import Workload

_log = logging.getLogger(__name__)

LAUNCH = 2.5
"""A step that takes longer than this many times the time that the roofs allow is bound by neither, but by launching its
operators (the overhead of He, Making Deep Learning Go Brrrr From First Principles, 2022).

The factor is ours: gpt-fast's compiled decode steps reach at least half of the 1,700 GB/s that its README (2024) finds
on an A100, and the eager step that it starts from, whose GPU waits for launches, a fifth (25.5 tokens/s of 13.5 GB).
"""
SURPASSED = 1.05
"""A step that is faster than its roof allows by more than this factor shows that the roof is none."""
NO_PEAKS = "The peaks of this machine could not be measured; the worker's log says why."
_CATALOG: dict[str, Dtype] = {
    "float32": "fp32",
    "tf32": "tf32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "float8_e4m3fn": "fp8",
}


class Roofline(RooflineFacts):
    """The roofline of a result: `metrics` (mbu, mfu, headroom, of training hfu: figures or a reason) and the facts."""

    metrics: dict[str, MetricSummary]

    @property
    def bound(self) -> Bound | None:
        return self.step.bound if self.step else None

    @property
    def surpassed(self) -> bool:
        """Whether a step was faster than the peaks allow, so that a second look at them may find better ones."""
        steps = [step for step in (self.step, self.prefill) if step]
        return any(step.measured_s is not None and step.measured_s < step.attainable_s for step in steps)

    @property
    def facts(self) -> RooflineFacts:
        return RooflineFacts(**{name: getattr(self, name) for name in RooflineFacts.model_fields})


def roofline_of(
    workload: Workload,
    metrics: Mapping[str, MetricSummary],
    facts: RunFacts,
    peaks: Peaks | None,
    published: Device | None,
) -> Roofline:
    """How far a variant is from the roofs of its machine; what cannot be known is null with the reason. Raises nothing.

    `workload` is a single one (expanded); `metrics` and `facts` are those of the variant's result; `published` is the
    machine in the catalog.
    """
    try:
        return _roofline(workload, metrics, facts, peaks, published)
    except UnsupportedError as error:
        reason = str(error)
    except Exception as error:
        _log.exception("the roofline of %s failed", workload.kind)
        reason = f"The roofline failed: {type(error).__name__}: {error}. Report it as a bug."
    return Roofline(metrics=_nulls(workload, reason), peaks=peaks, reason=reason)


def _roofline(
    workload: Workload,
    metrics: Mapping[str, MetricSummary],
    facts: RunFacts,
    peaks: Peaks | None,
    published: Device | None,
) -> Roofline:
    work = work_of(workload, facts)
    if peaks is None:
        raise UnsupportedError(NO_PEAKS)
    for dtype in work.dtypes:
        if dtype not in peaks.matmul_flops_per_s:
            raise UnsupportedError(peaks.reasons.get(dtype, f"No rate of {dtype} products was measured."))
    # How many operations are of each dtype is not known, so that all may be of the fastest.
    dtype = max(work.dtypes, key=lambda dtype: peaks.matmul_flops_per_s[dtype])
    roof, catalog = _measured_roof(peaks, work.step, dtype), _published_roof(published, dtype)
    if workload.primary not in metrics:
        raise UnsupportedError(f"{workload.primary} was not measured.")
    rate = _as_rate(metrics[workload.primary])
    too_fast = _too_fast(work, roof, rate)
    derived = _nulls(workload, too_fast) if too_fast else _metrics(workload, work, roof, rate)
    ahead = None
    if work.prefill and "ttft_s" in metrics:
        under = _measured_roof(peaks, work.prefill, dtype)
        ahead = _step(work.prefill, under, catalog, metrics["ttft_s"].value)
    return Roofline(
        metrics=derived,
        dtype=dtype,
        step=_step(work.step, roof, catalog, 1 / (rate.value * work.steps_per_unit) if rate.value else None),
        prefill=ahead,
        published=catalog,
        peaks=peaks,
        notes=(too_fast,) if too_fast else (),
    )


def least_s(roof: Roof, work: Work) -> float:
    """The least time that the work can take under a roof, in seconds."""
    return max(work.bytes / roof.bytes_per_s, work.flops / roof.flops_per_s)


def _measured_roof(peaks: Peaks, work: Work, dtype: str) -> Roof:
    """The bandwidth is the best at the largest array that is not larger than what the work moves, or at any above it.

    Where the work writes as well, copying counts too: some machines read and write at the same time.
    """
    best = _best_rate(peaks.reads, work.bytes)
    if work.writes and peaks.copies:
        best = max(best, _best_rate(peaks.copies, work.bytes), key=lambda rate: rate.bytes_per_s)
    return Roof(
        source="measured",
        bytes_per_s=best.bytes_per_s,
        flops_per_s=peaks.matmul_flops_per_s[dtype],
        array_bytes=best.array_bytes,
    )


def _best_rate(rates: Sequence[ReadRate], moved: float) -> ReadRate:
    smallest = max((rate.array_bytes for rate in rates if rate.array_bytes <= moved), default=0)
    return max((rate for rate in rates if rate.array_bytes >= smallest), key=lambda rate: rate.bytes_per_s)


def _published_roof(device: Device | None, dtype: str) -> Roof | None:
    """The catalog's figures for the whole device, where it has both."""
    if device is None or device.memory_bandwidth_bytes_per_s is None:
        return None
    known = _CATALOG.get(dtype)
    rate = device.peak_flop_per_s.get(known) if known else None
    if rate is None:
        return None
    return Roof(source=device.name, bytes_per_s=device.memory_bandwidth_bytes_per_s, flops_per_s=rate)


def _step(work: Work, roof: Roof, published: Roof | None, measured_s: float | None) -> RooflineStep:
    attainable_s = least_s(roof, work)
    bound = None
    if measured_s is not None:
        by_memory = work.bytes / roof.bytes_per_s >= work.flops / roof.flops_per_s
        bound = Bound.MEMORY if by_memory else Bound.COMPUTE
        bound = Bound.LAUNCH if measured_s > LAUNCH * attainable_s else bound
    return RooflineStep(
        name=work.name,
        bytes=work.bytes,
        flops=work.flops,
        flops_per_byte=work.flops / work.bytes,
        roof=roof,
        attainable_s=attainable_s,
        published_s=least_s(published, work) if published else None,
        measured_s=measured_s,
        bound=bound,
    )


def _as_rate(primary: MetricSummary) -> MetricSummary:
    """A rate as it is; a time as the rate that is its inverse."""
    if primary.value is None or primary.better is Better.HIGHER:
        return primary
    low, high = primary.ci or (None, None)
    changes = {
        "unit": "1/s",
        "better": Better.HIGHER,
        "value": 1 / primary.value,
        # An interval that contains the time 0 gives no bound of the rate.
        "ci": (1 / high, 1 / low) if low and high and low > 0 else None,
        "per_replicate": tuple(1 / value for value in primary.per_replicate),
    }
    return primary.model_copy(update=changes)


def _too_fast(work: VariantWork, roof: Roof, rate: MetricSummary) -> str | None:
    """Why the roof is none: the variant was faster than it allows. None where it was not."""
    times = (rate.value or 0.0) * work.steps_per_unit * least_s(roof, work.step)
    if times <= SURPASSED:
        return None
    return (
        f"It ran {times:.2f} times as fast as the measured peaks of this machine allow, so they are too low: the "
        "machine was slower or busy while they were measured. Measure again."
    )


def _metrics(
    workload: Workload, work: VariantWork, roof: Roof, primary: MetricSummary
) -> dict[str, MetricSummary]:
    """The primary metric is a rate: the shares of the peaks rise with it, and the headroom falls."""
    if primary.value is None:
        return _nulls(workload, primary.reason or "The primary metric was not measured.")
    step, per_unit = work.step, work.steps_per_unit
    mfu = _derived("mfu", primary, lambda rate: rate * per_unit * step.flops / roof.flops_per_s)
    mbu = _derived("mbu", primary, lambda rate: rate * per_unit * step.bytes / roof.bytes_per_s)
    of_training: dict[str, MetricSummary] = {}
    if work.executed_flops is not None:
        executed = work.executed_flops
        mbu = _null("mbu", "The bytes of activations, gradients and optimizer states are not known.")
        of_training["hfu"] = _derived(
            "hfu", primary, lambda rate: rate * per_unit * executed / roof.flops_per_s
        )
    return of_training | {
        "mbu": mbu,
        "mfu": mfu if step.flops else _null("mfu", f"The {step.name} has no matrix product."),
        "headroom": _derived("headroom", primary, lambda rate: 1 / (rate * per_unit * least_s(roof, step))),
    }


def _derived(name: str, rate: MetricSummary, of: Callable[[float], float]) -> MetricSummary:
    """A metric that is a monotone function of a measured rate: its interval's ends are those of the rate's."""
    assert rate.value is not None
    # An interval that contains the rate 0 gives no bound of the derived metric.
    low, high = sorted(map(of, rate.ci)) if rate.ci and rate.ci[0] > 0 else (None, None)
    return MetricSummary(
        unit=METRICS[name].unit,
        better=METRICS[name].better,
        value=of(rate.value),
        ci=None if low is None or high is None else (low, high),
        n=rate.n,
        replicates=rate.replicates,
        per_replicate=tuple(map(of, rate.per_replicate)),
        reason=rate.reason if rate.ci is None else None,
        cost_bound=rate.cost_bound,
    )


def _nulls(workload: Workload, reason: str) -> dict[str, MetricSummary]:
    of_training = ("hfu",) if workload.task is Task.TRAINING else ()
    return {name: _null(name, reason) for name in ("mbu", "mfu", *of_training, "headroom")}


def _null(name: str, reason: str) -> MetricSummary:
    return MetricSummary(unit=METRICS[name].unit, better=METRICS[name].better, value=None, reason=reason)
