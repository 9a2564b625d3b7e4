"""Attention over the length of the sequence: time and memory of each implementation."""

from collections.abc import Sequence

from optigpu.report.canvas import is_valid
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report
from optigpu.report.charts.metrics import figure_of, interval_of, label_of, reason_of
from optigpu.report.origin import origin_line
from optigpu.vocabulary import Document, SpecError


def lengths_data(report: Report) -> ChartData:
    """Raises SpecError where no result is of the workload attention and has a latency."""
    shown = [each for each in report.results if each["variant"]["workload"].get("kind") == "attention"]
    if not any(figure_of(each, "latency_s") for each in shown):
        raise SpecError(
            "No result is of attention; run `optigpu run --workload attention --lengths 128,256,512,1024`."
        )
    return ChartData(
        title=report.title,
        panels=(
            _panel("Time", shown, "latency_s", 1e3, "latency of a call (ms)"),
            _panel("Memory", shown, "peak_bytes", 1e-6, "peak memory of a call (MB)"),
        ),
        note="Both axes are logarithmic. Bars: 95% intervals. Less is better.",
        origin=origin_line(shown),
    )


def _panel(title: str, results: Sequence[Document], name: str, scale: float, axis: str) -> Panel:
    found = [(result, figure_of(result, name)) for result in results]
    return Panel(
        title=title,
        form=Form.LINES,
        axis=axis,
        x_axis="length of the sequence (tokens)",
        logarithmic=True,
        marks=tuple(
            Mark(
                label=label_of(result),
                series="/".join(result["variant"]["workload"]["implementations"]),
                x=max(result["variant"]["workload"]["lengths"]),
                value=metric["value"] * scale,
                ci=interval_of(metric, scale),
                valid=is_valid(result),
                source=str(result["id"]),
            )
            for result, metric in found
            if metric and metric["value"] > 0
        ),
        missing={label_of(result): reason_of(result, name) for result, metric in found if not metric},
    )
