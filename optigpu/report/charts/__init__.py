"""Charts of results as files, with their data beside them as JSON. matplotlib is imported when a chart is drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optigpu.documents.result import Attribution
from optigpu.report.charts.architecture import architecture_data, paint_boxes
from optigpu.report.charts.baselines import baselines_data
from optigpu.report.charts.batches import batches_data, loads_data
from optigpu.report.charts.bits import bits_data
from optigpu.report.charts.comparison import comparison_data, paint_table
from optigpu.report.charts.described import ladder_data, quality_data, roofline_data, throughput_data
from optigpu.report.charts.ladder import ladder_chart
from optigpu.report.charts.lengths import lengths_data
from optigpu.report.charts.marks import ChartData, Report
from optigpu.report.charts.overview import overview_data
from optigpu.report.charts.paint import paint
from optigpu.report.charts.pareto import pareto_data
from optigpu.report.charts.precision import precision_data
from optigpu.report.charts.quality import GOAL_PERCENT, quality_chart
from optigpu.report.charts.roofline import roofline_chart
from optigpu.report.charts.throughput import throughput_chart
from optigpu.report.charts.waterfall import waterfall_data
from optigpu.vocabulary import Document

Drawn = Callable[[str, Sequence[Document], Path], None]
"""Draws results straight: title, results, file."""


@dataclass(frozen=True)
class Chart:
    """A kind of chart. `data` says what it shows and raises SpecError, with what to run, where there is nothing;
    `draw` writes the picture."""

    summary: str
    data: Callable[[Report], ChartData]
    draw: Callable[[Report, Path], None]

    def __call__(
        self, title: str, results: Sequence[Document], path: Path, attribution: Attribution | None = None
    ) -> None:
        """Writes the picture of results. Raises SpecError or OptiGPUError as `draw` does."""
        self.draw(Report(title, results, attribution), path)


def _straight(summary: str, data: Callable[[Report], ChartData], drawn: Drawn) -> Chart:
    return Chart(summary, data, lambda report, path: drawn(report.title, report.results, path))


def _painted(
    summary: str,
    data: Callable[[Report], ChartData],
    painter: Callable[[ChartData, Path], None] = paint,
) -> Chart:
    return Chart(summary, data, lambda report, path: painter(data(report), path))


CHARTS: dict[str, Chart] = {
    "ladder": _straight("the primary metric of each variant", ladder_data, ladder_chart),
    "roofline": _straight("each variant below the measured roofs", roofline_data, roofline_chart),
    "quality": _straight("speed over the loss of quality", quality_data, quality_chart),
    "throughput": _straight("speed over the latency of a request", throughput_data, throughput_chart),
    "precision": _painted("latency and memory of each precision", precision_data),
    "overview": _painted("four panels: speedup, memory, utilization, loss of quality", overview_data),
    "lengths": _painted("time and memory of attention over the length", lengths_data),
    "batches": _painted("throughput against p95 latency over the batch", batches_data),
    "loads": _painted("throughput against p95 latency over the rate of requests", loads_data),
    "pareto": _painted("speed over bytes and over divergence, with what none surpasses", pareto_data),
    "bits": _painted("bytes of the weights over divergence, with what none surpasses", bits_data),
    "waterfall": _painted("what each rung of a ladder adds", waterfall_data),
    "comparison": _painted("the comparison table as a picture", comparison_data, paint_table),
    "baselines": _painted("results beside what is claimed for an RTX 5090", baselines_data),
    "architecture": _painted(
        "model, layers, figures and machine as a diagram", architecture_data, paint_boxes
    ),
}
"""The charts by name."""

__all__ = [
    "CHARTS",
    "GOAL_PERCENT",
    "Chart",
    "ChartData",
    "Report",
    "ladder_chart",
    "quality_chart",
    "roofline_chart",
    "throughput_chart",
]
