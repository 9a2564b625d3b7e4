"""One figure over another with a line through what no other surpasses: of a report's results, and of a board's rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optigpu.documents.views import Board, LeaderboardRow, Standing
from optigpu.report.charts.marks import (
    ChartData,
    Form,
    Interval,
    Mark,
    Panel,
    Report,
    figure_of,
    first_measured,
    interval_of,
    is_valid,
    label_of,
    primary_of,
    reason_of,
)
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.statistics.front import Bounds, unsurpassed
from optigpu.vocabulary import METRICS, Better, Document, SpecError

MEMORIES = ("peak_bytes", "weight_bytes")
"""The preferred metric first: the accelerator's peak is known on a GPU alone."""


@dataclass(frozen=True)
class _Other:
    """What speed is shown over."""

    title: str
    metric: str
    axis: str
    scale: float = 1.0
    logarithmic: bool = False


DIVERGENCE = _Other(
    "Speed over the divergence from fp32", "kld_mean", "mean divergence from fp32 (nat)", logarithmic=True
)


def pareto_data(report: Report) -> ChartData:
    """Raises SpecError where there is nothing to choose from, and for results that cannot be compared."""
    shown = [each for each in report.results if primary_of(each)["value"] is not None]
    memory = first_measured(shown, MEMORIES)
    if memory is None:
        raise SpecError(
            "No result has both a speed and the bytes of its weights; run `optigpu run --model bundled:tiny "
            "--beside llama_cpp/gguf`."
        )
    if len({(each["variant"]["workload_digest"], _machine(each)) for each in shown}) > 1:
        raise SpecError(
            "Results of several workloads or machines cannot surpass each other; draw those of one workload on one "
            "machine."
        )
    what = "peak memory" if memory == "peak_bytes" else "bytes of the weights"
    bytes_ = _Other(f"Speed over the {what}", memory, f"{what} (MB)", 1e-6)
    return ChartData(
        title=report.title,
        panels=tuple(_panel(other, shown) for other in (bytes_, DIVERGENCE)),
        note="Joined: what no other valid result surpasses, as good on both axes and better on one; speeds whose "
        "intervals overlap count as equal. Lines: 95% intervals. Hollow: not valid.",
        origin=origin_line(shown),
    )


def _machine(result: Document) -> str:
    return str(result["environment"]["hardware_class"])


def _panel(other: _Other, results: Sequence[Document]) -> Panel:
    found = [each for each in results if figure_of(each, other.metric)]
    valid = [each for each in found if is_valid(each)]
    best = {valid[number]["id"] for number in unsurpassed([_point(each, other) for each in valid])}
    return Panel(
        title=other.title,
        form=Form.FRONT,
        axis=heading(results[0]["variant"]["primary_metric"]),
        x_axis=other.axis,
        logarithmic=other.logarithmic,
        marks=tuple(_mark(each, other, on_front=each["id"] in best) for each in found),
        missing={label_of(each): reason_of(each, other.metric) for each in results if each not in found},
    )


def _point(result: Document, other: _Other) -> tuple[Bounds, Bounds]:
    """More is better."""
    name = result["variant"]["primary_metric"]
    return _bounds(primary_of(result), name), _bounds(result["metrics"][other.metric], other.metric)


def _bounds(metric: Document, name: str) -> Bounds:
    low, high = interval_of(metric) or (metric["value"], metric["value"])
    return (low, high) if METRICS[name].better is Better.HIGHER else (-high, -low)


def _mark(result: Document, other: _Other, *, on_front: bool) -> Mark:
    primary, metric = primary_of(result), result["metrics"][other.metric]
    return Mark(
        label=label_of(result),
        x=metric["value"] * other.scale,
        x_ci=interval_of(metric, other.scale),
        value=primary["value"],
        ci=interval_of(primary),
        text=label_of(result) if on_front else "",
        valid=is_valid(result),
        on_front=on_front,
        source=str(result["id"]),
    )


@dataclass(frozen=True)
class Axis:
    """A figure of a row that a chart can show: its name with the unit, its value and its interval."""

    name: str
    value: Callable[[LeaderboardRow], float | None]
    ci: Callable[[LeaderboardRow], Interval | None] = lambda _: None
    better: Better = Better.LOWER
    logarithmic: bool = False


AXES = {
    "weights": Axis("weights (MB)", lambda row: _times(row.weight_bytes, 1e-6)),
    "memory": Axis("peak memory (MB)", lambda row: _times(row.peak_bytes, 1e-6)),
    "divergence": Axis("mean divergence from fp32 (nat)", lambda row: row.kld_mean, logarithmic=True),
    "agreement": Axis(
        "top-1 agreement with fp32 (%)", lambda row: _times(row.top1_agreement, 100.0), better=Better.HIGHER
    ),
    "energy": Axis("energy (J/token)", lambda row: row.j_per_token),
}
"""What speed, or each other, can be shown over."""


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def speed_axis(board: Board) -> Axis:
    """The metric that a board is ranked by."""
    return Axis(
        heading(board.metric), lambda row: row.value.value, lambda row: row.value.ci, better=board.better
    )


def front_panel(
    rows: Sequence[LeaderboardRow],
    x: Axis,
    y: Axis,
    series: Callable[[LeaderboardRow], str] = lambda row: row.backend,
) -> Panel:
    """A point for each row that has both figures. On the front is what no other ranked row surpasses in the two."""
    shown = [(row, x.value(row), y.value(row)) for row in rows]
    found = [(row, at, value) for row, at, value in shown if at is not None and value is not None]
    ranked = [row for row, _, _ in found if row.standing is Standing.CURRENT]
    best = {
        ranked[number].result_id
        for number in unsurpassed([(_row_bounds(x, row), _row_bounds(y, row)) for row in ranked])
    }
    several = len({series(row) for row in rows}) > 1
    return Panel(
        title=f"{y.name} over {x.name}",
        form=Form.FRONT,
        axis=y.name,
        x_axis=x.name,
        better=y.better,
        x_better=x.better,
        logarithmic=x.logarithmic,
        marks=tuple(
            Mark(
                label=row.label,
                series=series(row) if several else "",
                x=at,
                x_ci=x.ci(row),
                value=value,
                ci=y.ci(row),
                valid=row.standing is not Standing.INVALID,
                on_front=row.result_id in best,
                source=row.result_id,
            )
            for row, at, value in found
        ),
        missing={
            row.label: f"{x.name} or {y.name} was not measured"
            for row, at, value in shown
            if at is None or value is None
        },
    )


def _row_bounds(axis: Axis, row: LeaderboardRow) -> Bounds:
    """More is better."""
    value = axis.value(row) or 0.0
    low, high = axis.ci(row) or (value, value)
    return (low, high) if axis.better is Better.HIGHER else (-high, -low)


BYTES, KLD = "weight_bytes", "kld_mean"


def bits_data(report: Report) -> ChartData:
    """Speed is not looked at. Raises SpecError where no result has both figures, and for those of several models."""
    shown = [each for each in report.results if figure_of(each, BYTES) and figure_of(each, KLD)]
    if not shown:
        raise SpecError(
            "No result has both the bytes of its weights and a divergence from fp32; run `optigpu run --model "
            "bundled:tiny --stack native_decode --meters latency,memory,quality`."
        )
    if len({each["variant"]["model"] for each in shown}) > 1:
        raise SpecError("Bytes of several models cannot surpass each other; draw the results of one model.")
    valid = [each for each in shown if is_valid(each)]
    best = {valid[number]["id"] for number in unsurpassed([_bits_point(each) for each in valid])}
    panel = Panel(
        title="Bytes of the weights over the divergence from fp32",
        form=Form.FRONT,
        axis="bytes of the weights (MB)",
        x_axis="mean divergence from fp32 (nat)",
        logarithmic=True,
        logarithmic_values=True,
        better=Better.LOWER,
        marks=tuple(_bits_mark(each, on_front=each["id"] in best) for each in shown),
        missing={label_of(each): reason_of(each, KLD) for each in report.results if each not in shown},
    )
    return ChartData(
        title=report.title,
        panels=(panel,),
        note="Joined: what no other valid result surpasses, as small and as close and better in one of the two; "
        "divergences whose intervals overlap count as equal. Lines: 95% intervals. Hollow: not valid.",
        origin=origin_line(shown),
    )


def _bits_point(result: Document) -> tuple[Bounds, Bounds]:
    """More is better."""
    size, divergence = result["metrics"][BYTES]["value"], result["metrics"][KLD]
    low, high = interval_of(divergence) or (divergence["value"], divergence["value"])
    return (-size, -size), (-high, -low)


def _bits_mark(result: Document, *, on_front: bool) -> Mark:
    divergence = result["metrics"][KLD]
    return Mark(
        label=label_of(result),
        x=divergence["value"],
        x_ci=interval_of(divergence),
        value=result["metrics"][BYTES]["value"] * 1e-6,
        text=label_of(result) if on_front else "",
        valid=is_valid(result),
        on_front=on_front,
        source=str(result["id"]),
    )
