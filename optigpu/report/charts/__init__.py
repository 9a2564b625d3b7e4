"""Charts of results as files, with their data beside them as JSON; `svg/` draws them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from optigpu.documents.result import Attribution
from optigpu.paths import saying
from optigpu.report.charts.baselines import baselines_data
from optigpu.report.charts.fronts import batches_data, bits_data, lengths_data, loads_data, pareto_data
from optigpu.report.charts.marks import ChartData, Report
from optigpu.report.charts.svg.picture import SUFFIXES, write_picture
from optigpu.report.charts.variants import (
    ladder_data,
    overview_data,
    precision_data,
    quality_data,
    roofline_data,
    waterfall_data,
)
from optigpu.vocabulary import Document, SpecError


@dataclass(frozen=True)
class Chart:
    """A kind of chart. `data` says what it shows and raises SpecError, with what to run, where there is nothing."""

    data: Callable[[Report], ChartData]

    def draw(self, report: Report, path: Path) -> None:
        """Writes the picture. Raises as `data` and `write_picture` do."""
        write_picture(self.data(report), path)

    def __call__(
        self, title: str, results: Sequence[Document], path: Path, attribution: Attribution | None = None
    ) -> None:
        """Writes the picture of results, as `draw` does."""
        self.draw(Report(title, results, attribution), path)

    def write(self, report: Report, stem: Path) -> tuple[Path, ...]:
        """The chart as SVG and PNG, and its data as JSON. Raises SpecError where there is nothing of that kind, OSError
        or OptiGPUError where the files cannot be written."""
        data, beside = self.data(report), stem.with_suffix(".json")
        files = [stem.with_suffix(suffix) for suffix in SUFFIXES]
        for file in files:
            write_picture(data, file)
        beside.write_text(data.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return (*files, beside)


CHARTS: dict[str, Chart] = {
    "ladder": Chart(ladder_data),
    "roofline": Chart(roofline_data),
    "quality": Chart(quality_data),
    "precision": Chart(precision_data),
    "overview": Chart(overview_data),
    "lengths": Chart(lengths_data),
    "batches": Chart(batches_data),
    "loads": Chart(loads_data),
    "pareto": Chart(pareto_data),
    "bits": Chart(bits_data),
    "waterfall": Chart(waterfall_data),
    "baselines": Chart(baselines_data),
}
"""The charts by name."""


class Written(NamedTuple):
    """What became of one kind of chart: its files, or the reason why it was not drawn."""

    name: str
    files: tuple[Path, ...] = ()
    reason: str | None = None


def write_charts(report: Report, folder: Path) -> list[Written]:
    """Every kind in turn; one that the report has no figures for is named with the reason. Raises SpecError where no
    kind can be drawn, OptiGPUError where the folder cannot be written."""
    if not report.results:
        raise SpecError(
            "The report has no result to draw; run `optigpu ladder --model preset:gpt2 --stack int8_weight_only` first."
        )
    written: list[Written] = []
    with saying(f"{folder} cannot be written", "make it writable, or name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, chart in CHARTS.items():
            try:
                written.append(Written(name, chart.write(report, folder / name)))
            except SpecError as error:
                written.append(Written(name, reason=str(error)))
    if not any(each.files for each in written):
        reasons = " ".join(f"{each.name}: {each.reason}" for each in written)
        raise SpecError(f"No chart can be drawn from this report. {reasons}")
    return written


__all__ = ["CHARTS", "Chart", "ChartData", "Report"]
