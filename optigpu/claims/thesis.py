"""The two founding claims. The thesis: the speedup by optimization on one machine is larger than the gap between two
machines. And the comparison of a microcontroller and a graphics card: what it claims, what its own figures amount to,
what published figures predict and what was measured stand side by side, none of them in the place of another."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from enum import StrEnum
from typing import Literal

from optigpu.claims.model import (
    Book,
    Claim,
    ComparedMachine,
    FoundingClaim,
    Plausibility,
    ThesisClaim,
    plain,
    rounded,
)
from optigpu.claims.rules import flop_per_item, judge, peak_flop_per_s
from optigpu.documents.devices import EdgeBoard, EdgeMetric, EdgeWorkerRow
from optigpu.edge.fit import check_claim
from optigpu.hardware.catalog import Device, Dtype, devices, find, find_class
from optigpu.hardware.catalog import board as board_of
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


class MachineFigures(Frozen):
    """What a machine's claims amount to. Rates are of images per second, `peak_fps` is the most that the catalog's peak
    allows; null where the catalog or the model's MACs are not known."""

    hardware: str
    fps: float
    power_w: float
    fps_per_watt: float
    claimed_fps_per_watt: float
    price: float
    peak_fps: float | None
    peak_fps_per_watt: float | None


class Arithmetic(Frozen):
    """What the comparison's own figures give. `peak_ratio` is that of work per energy if both ran at their peaks."""

    smaller: MachineFigures
    larger: MachineFigures
    ratio: float
    claimed_ratio: float
    peak_ratio: float | None
    sentences: tuple[str, ...]


class Predicted(Frozen):
    """What published figures of the microcontroller allow at the most, for images of one size: never a measurement."""

    kind: Literal["prediction"] = "prediction"
    image_size: int
    macs: int
    max_fps: float
    max_fps_per_watt: float
    plausible: bool
    sentence: str
    source: str


class MeasuredDevice(Frozen):
    """The device with the most images per joule among those that rank, of the claim's network and chip."""

    device_id: str
    board: str
    network: str
    model_sha256: str
    fps: float
    fps_per_watt: float
    power_source: str
    report_id: str


class MeasuredWorker(Frozen):
    """The worker beside it with the most images per joule; on the claim's hardware if one is, which `named` says."""

    hardware: str
    named: bool
    backend: str
    label: str
    fps: float
    fps_per_watt: float
    energy_source: str | None
    result_id: str


class FoundingComparison(Frozen):
    """The comparison, and what became of it. `ratio` is that of what was measured."""

    sentence: str
    source: str
    plausibility: Plausibility
    arithmetic: Arithmetic
    predictions: tuple[Predicted, ...]
    device: MeasuredDevice | None
    worker: MeasuredWorker | None
    ratio: float | None
    verdict: ClaimVerdict


def compare_founding(book: Book, boards: Iterable[EdgeBoard]) -> FoundingComparison | None:
    """The comparison with what an edge leaderboard has of it; None if the book has none."""
    claim = book.founding
    if claim is None:
        return None
    device, worker = _measured(book, claim, boards)
    ratio = device.fps_per_watt / worker.fps_per_watt if device and worker else None
    judged = [judge(book.claim(each), book).plausibility for each in claim.claims]
    smaller, larger = _figures(book, claim.smaller), _figures(book, claim.larger)
    peaks = smaller.peak_fps_per_watt, larger.peak_fps_per_watt
    found = Arithmetic(
        smaller=smaller,
        larger=larger,
        ratio=smaller.fps_per_watt / larger.fps_per_watt,
        claimed_ratio=book.claim(claim.ratio).quantity,
        peak_ratio=peaks[0] / peaks[1] if peaks[0] and peaks[1] else None,
        sentences=(),
    )
    return FoundingComparison(
        sentence=claim.sentence,
        source=claim.source,
        plausibility=max(judged, key=tuple(Plausibility).index),
        arithmetic=found.model_copy(update={"sentences": tuple(_sentences(found, claim.image_sizes[0]))}),
        predictions=tuple(_predictions(book, claim)),
        device=device,
        worker=worker,
        ratio=ratio,
        verdict=_verdict(book.claim(claim.ratio), ratio, worker),
    )


def _figures(book: Book, machine: ComparedMachine) -> MachineFigures:
    latency, power = book.claim(machine.latency), book.claim(machine.power)
    device, flop = find(latency.hardware or ""), flop_per_item(latency, book)
    peak_rate = peak_flop_per_s(latency, device) if device else None
    peak = peak_rate / flop if peak_rate and flop else None
    fps = 1 / latency.quantity
    return MachineFigures(
        hardware=latency.hardware or "",
        fps=fps,
        power_w=power.quantity,
        fps_per_watt=fps / power.quantity,
        claimed_fps_per_watt=book.claim(machine.efficiency).quantity,
        price=book.claim(machine.price).quantity,
        peak_fps=peak,
        peak_fps_per_watt=peak / power.quantity if peak else None,
    )


def _sentences(found: Arithmetic, size: int) -> Iterator[str]:
    """`size` is the side of the images that the peaks are for."""
    smaller, larger = found.smaller, found.larger
    yield (
        f"Its own figures: {_at(smaller)} against {_at(larger)}, {plain(found.ratio)} times (printed as "
        f"{plain(found.claimed_ratio)}); the {larger.hardware} costs {plain(larger.price / smaller.price)} times as "
        f"much and is {plain(larger.fps / smaller.fps)} times as fast."
    )
    if smaller.peak_fps is not None and smaller.peak_fps < smaller.fps:
        yield (
            f"For {size}x{size} the {smaller.hardware}'s peak allows {plain(smaller.peak_fps)} FPS at the most, so "
            f"{plain(smaller.fps)} FPS cannot be."
        )
    if larger.peak_fps is not None and found.peak_ratio is not None:
        yield (
            f"The {larger.hardware} is almost idle with one image at a time: its peak is {plain(larger.peak_fps)} FPS, "
            f"and at both peaks the ratio is {plain(found.peak_ratio)}."
        )


def _at(machine: MachineFigures) -> str:
    return f"{plain(machine.fps)} FPS at {plain(machine.power_w)} W = {plain(machine.fps_per_watt)} FPS/W"


def _predictions(book: Book, claim: FoundingClaim) -> Iterator[Predicted]:
    """The multiply-accumulates of a convolutional network grow with the pixels."""
    latency, power = book.claim(claim.smaller.latency), book.claim(claim.smaller.power)
    macs = book.macs_of(latency.model)
    for size in claim.image_sizes if macs else ():
        scaled = round((macs or 0) * (size / claim.image_sizes[0]) ** 2)
        checked = check_claim(scaled)
        fps = checked.published_macs_per_s / scaled
        yield Predicted(
            image_size=size,
            macs=scaled,
            max_fps=fps,
            max_fps_per_watt=fps / power.quantity,
            plausible=checked.plausible,
            sentence=f"Prediction for {size}x{size}: at most {plain(fps)} FPS, by the fastest published rate.",
            source=checked.published.source,
        )


def _measured(
    book: Book, claim: FoundingClaim, boards: Iterable[EdgeBoard]
) -> tuple[MeasuredDevice | None, MeasuredWorker | None]:
    """The best device, and of the workers beside it the best."""
    smaller, larger = book.claim(claim.smaller.latency), book.claim(claim.larger.latency)
    found: list[tuple[EdgeBoard, MeasuredDevice]] = []
    for board in boards:
        if board.network is None or board.network.family != smaller.model:
            continue
        for row in board.rows:
            known, efficiency = board_of(row.board), row.figures[EdgeMetric.FPS_PER_WATT].value
            if row.rank is None or known is None or smaller.hardware is None or efficiency is None:
                continue
            if find(known.chip.name) is find(smaller.hardware):
                device = MeasuredDevice(
                    device_id=row.device_id,
                    board=row.board,
                    network=board.network.label,
                    model_sha256=board.model_sha256,
                    fps=row.figures[EdgeMetric.FPS].value or 0.0,
                    fps_per_watt=efficiency,
                    power_source=row.power_source,
                    report_id=row.report_id,
                )
                found.append((board, device))
    if not found:
        return None, None
    best, device = max(found, key=lambda each: each[1].fps_per_watt)
    return device, _worker(best.workers, find(larger.hardware or ""))


def _worker(rows: Iterable[EdgeWorkerRow], wanted: Device | None) -> MeasuredWorker | None:
    made = [
        MeasuredWorker(
            hardware=row.hardware,
            named=wanted is not None and find_class(row.hardware) is wanted,
            backend=row.backend,
            label=row.label,
            fps=row.images_per_s or 0.0,
            fps_per_watt=row.fps_per_watt,
            energy_source=row.energy_source,
            result_id=row.result_id,
        )
        for row in rows
        if row.fps_per_watt is not None
    ]
    return max(made, key=lambda each: (each.named, each.fps_per_watt), default=None)


def _verdict(claim: Claim, ratio: float | None, worker: MeasuredWorker | None) -> ClaimVerdict:
    if ratio is None or worker is None:
        return ClaimVerdict.NOT_MEASURED
    if not worker.named:
        return ClaimVerdict.UNDECIDED
    return ClaimVerdict.HOLDS if ratio >= rounded(claim)[0] else ClaimVerdict.DOES_NOT_HOLD
