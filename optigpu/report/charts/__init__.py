"""Charts of results as files, with their data beside them as JSON; `svg/` draws them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from optigpu.paths import saying
from optigpu.report.charts.fronts import batches_data, bits_data, lengths_data, loads_data, pareto_data
from optigpu.report.charts.marks import ChartData, Report
from optigpu.report.charts.svg import SUFFIXES, write_picture
from optigpu.report.charts.timeline import timeline_data
from optigpu.report.charts.variants import (
    baselines_data,
    ladder_data,
    overview_data,
    precision_data,
    quality_data,
    roofline_data,
    waterfall_data,
)
from optigpu.vocabulary import SpecError

CHARTS: dict[str, Callable[[Report], ChartData]] = {
    "ladder": ladder_data,
    "roofline": roofline_data,
    "quality": quality_data,
    "precision": precision_data,
    "overview": overview_data,
    "lengths": lengths_data,
    "batches": batches_data,
    "loads": loads_data,
    "pareto": pareto_data,
    "bits": bits_data,
    "waterfall": waterfall_data,
    "baselines": baselines_data,
    "timeline": timeline_data,
}
"""What each kind of chart shows of a report. Raises SpecError, with what to run, where there is nothing."""


def write_chart(data: ChartData, stem: Path) -> tuple[Path, ...]:
    """The chart as SVG and PNG, and its data as JSON. Raises OSError or OptiGPUError where these cannot be written."""
    files = [stem.with_suffix(suffix) for suffix in SUFFIXES]
    for file in files:
        write_picture(data, file)
    beside = stem.with_suffix(".json")
    beside.write_text(data.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return (*files, beside)


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
        for name, data_of in CHARTS.items():
            try:
                written.append(Written(name, write_chart(data_of(report), folder / name)))
            except SpecError as error:
                written.append(Written(name, reason=str(error)))
    if not any(each.files for each in written):
        reasons = " ".join(f"{each.name}: {each.reason}" for each in written)
        raise SpecError(f"No chart can be drawn from this report. {reasons}")
    return written


__all__ = ["CHARTS", "ChartData", "Report", "write_picture"]
