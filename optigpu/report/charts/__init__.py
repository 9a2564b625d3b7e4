"""Charts of results as files, with their data beside them as JSON; `svg/` draws them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optigpu.documents.result import Attribution
from optigpu.report.charts.fronts import bits_data, pareto_data
from optigpu.report.charts.ladders import overview_data, waterfall_data
from optigpu.report.charts.marks import ChartData, Report
from optigpu.report.charts.summaries import architecture_data, baselines_data, comparison_data
from optigpu.report.charts.svg.picture import write_picture
from optigpu.report.charts.sweeps import batches_data, lengths_data, loads_data
from optigpu.report.charts.variants import (
    ladder_data,
    precision_data,
    quality_data,
    roofline_data,
    throughput_data,
)
from optigpu.vocabulary import Document


@dataclass(frozen=True)
class Chart:
    """A kind of chart. `data` says what it shows and raises SpecError, with what to run, where there is nothing."""

    summary: str
    data: Callable[[Report], ChartData]

    def draw(self, report: Report, path: Path) -> None:
        """Writes the picture. Raises as `data` and `write_picture` do."""
        write_picture(self.data(report), path)

    def __call__(
        self, title: str, results: Sequence[Document], path: Path, attribution: Attribution | None = None
    ) -> None:
        """Writes the picture of results, as `draw` does."""
        self.draw(Report(title, results, attribution), path)


CHARTS: dict[str, Chart] = {
    "ladder": Chart("the primary metric of each variant", ladder_data),
    "roofline": Chart("each variant below the measured roofs", roofline_data),
    "quality": Chart("speed over the loss of quality", quality_data),
    "throughput": Chart("speed over the latency of a request", throughput_data),
    "precision": Chart("latency and memory of each precision", precision_data),
    "overview": Chart("four panels: speedup, memory, utilization, loss of quality", overview_data),
    "lengths": Chart("time and memory of attention over the length", lengths_data),
    "batches": Chart("throughput against p95 latency over the batch", batches_data),
    "loads": Chart("throughput against p95 latency over the rate of requests", loads_data),
    "pareto": Chart("speed over bytes and over divergence, with what none surpasses", pareto_data),
    "bits": Chart("bytes of the weights over divergence, with what none surpasses", bits_data),
    "waterfall": Chart("what each rung of a ladder adds", waterfall_data),
    "comparison": Chart("the comparison table as a picture", comparison_data),
    "baselines": Chart("results beside what is claimed for an RTX 5090", baselines_data),
    "architecture": Chart("model, layers, figures and machine as a diagram", architecture_data),
}
"""The charts by name."""

__all__ = ["CHARTS", "Chart", "ChartData", "Report"]
