"""The thesis of the project: the speedup by optimization on one machine is larger than the gap between two machines."""

from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum

from optigpu.claims.model import ThesisClaim
from optigpu.hardware.catalog import Device, Dtype, devices, find, find_class
from optigpu.vocabulary import Document, Frozen, SpecError

ARITHMETIC: tuple[Dtype, ...] = ("fp16", "bf16", "fp32", "int8")
"""Two machines are compared by the peak of the first dtype that both have."""


class ClaimVerdict(StrEnum):
    """`undecided`: above one measure of the hardware gap but not the other, or the interval contains it."""

    NOT_MEASURED = "not measured"
    HOLDS = "holds here"
    DOES_NOT_HOLD = "does not hold here"
    UNDECIDED = "undecided here"


class OptimizationGap(Frozen):
    """The best stack over the baseline in one job: a ratio of its primary metric with its 95% interval."""

    ratio: float
    ci: tuple[float, float] | None
    label: str
    metric: str
    hardware: str


class HardwareGap(Frozen):
    """Published peaks of one machine over another's; null if the catalog lacks one of the two."""

    larger: str
    smaller: str
    bandwidth: float | None
    arithmetic: float | None
    dtype: Dtype | None

    @property
    def ratios(self) -> dict[str, float]:
        both = {"memory bandwidth": self.bandwidth, f"{self.dtype} arithmetic": self.arithmetic}
        return {name: ratio for name, ratio in both.items() if ratio is not None}

    @property
    def sentence(self) -> str:
        """For example `the RTX 5090 has 5.6x the memory bandwidth and 3.2x the fp16 arithmetic of the T4`."""
        measures = " and ".join(f"{ratio:.1f}x the {name}" for name, ratio in self.ratios.items())
        return f"By the catalog, the {self.larger} has {measures or 'unknown peaks'} of the {self.smaller}."


class Thesis(Frozen):
    """The optimization gap and the hardware gap."""

    sentence: str
    source: str
    optimization: OptimizationGap | None
    hardware: HardwareGap
    verdict: ClaimVerdict


def weigh(claim: ThesisClaim, reports: Iterable[Document], against: str | None = None) -> Thesis:
    """Compares the two gaps, from reports of jobs: `{"spec", "results", "attribution"}`. The machines are the two that
    the thesis names. With `against`, they are that device and the one that the largest gap was measured on (the
    thesis's smaller one where the catalog does not know it). Raises SpecError for a name that is not in the catalog."""
    gap = max(
        (gap for report in reports if (gap := gap_of(report))), key=lambda each: each.ratio, default=None
    )
    smaller, larger = _known(claim.smaller), _known(claim.larger)
    if against is not None:
        larger = _known(against)
        smaller = (find_class(gap.hardware) if gap else None) or smaller
    hardware = _hardware_gap(larger, smaller)
    verdict = ClaimVerdict.NOT_MEASURED
    if gap is not None:
        above = {bound > ratio for ratio in hardware.ratios.values() for bound in gap.ci or (gap.ratio,)}
        verdict = ClaimVerdict.HOLDS if above == {True} else ClaimVerdict.UNDECIDED
        if above == {False}:
            verdict = ClaimVerdict.DOES_NOT_HOLD
    return Thesis(
        sentence=claim.sentence,
        source=claim.source,
        optimization=gap,
        hardware=hardware,
        verdict=verdict,
    )


def gap_of(report: Document) -> OptimizationGap | None:
    """The valid speedup of a job's best stack over its baseline; None without both, or with several machines."""
    attribution = report.get("attribution") or {}
    best = attribution.get("best")
    row = next((row for row in attribution.get("rows", ()) if row["index"] == best), None)
    if row is None or not row["speedup"] or row["speedup"].get("reasons"):
        return None
    hardware = {result["environment"]["hardware_class"] for result in report["results"]}
    if len(hardware) != 1:
        return None
    gain = row["speedup"]
    return OptimizationGap(
        ratio=gain["ratio"],
        ci=gain["ci"],
        label=row["label"],
        metric=attribution["metric"],
        hardware=hardware.pop(),
    )


def _known(name: str) -> Device:
    device = find(name)
    if device is None:
        names = {each.casefold(): each for device in devices() for each in (device.name, *device.aliases)}
        close = [names[match] for match in get_close_matches(name.casefold(), names, n=3)]
        hint = f"did you mean {' or '.join(close)}?" if close else "`GET /v1/hardware` lists what it has."
        raise SpecError(f"The catalog has no hardware {name!r}; {hint}")
    return device


def _hardware_gap(one: Device, other: Device) -> HardwareGap:
    """The gap as a ratio above 1, by memory bandwidth, or by arithmetic if a bandwidth is unknown."""
    dtype = next((d for d in ARITHMETIC if d in one.peak_flop_per_s and d in other.peak_flop_per_s), None)
    bandwidth = _over(one.memory_bandwidth_bytes_per_s, other.memory_bandwidth_bytes_per_s)
    arithmetic = _over(one.peak_flop_per_s[dtype], other.peak_flop_per_s[dtype]) if dtype else None
    if (bandwidth or arithmetic or 1.0) < 1.0:
        return _hardware_gap(other, one)
    return HardwareGap(
        larger=one.name, smaller=other.name, bandwidth=bandwidth, arithmetic=arithmetic, dtype=dtype
    )


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None
