"""Speed over the bytes and over the divergence from fp32, with a line through the results that no other surpasses."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.report.canvas import is_valid
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report
from optigpu.report.charts.metrics import (
    figure_of,
    first_measured,
    interval_of,
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
