"""Writes every chart that a report has the figures for: SVG and PNG, and the data as JSON beside them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optigpu.report.charts import CHARTS, Chart
from optigpu.report.charts.marks import Report
from optigpu.report.charts.svg.picture import SUFFIXES, write_picture
from optigpu.vocabulary import OptiGPUError, SpecError


@dataclass(frozen=True)
class Written:
    """What became of one kind of chart: its files, or the reason why it was not drawn."""

    name: str
    files: tuple[Path, ...] = ()
    reason: str | None = None


def write_charts(report: Report, folder: Path) -> list[Written]:
    """Every kind in turn; one that the report has no figures for is named with the reason.

    Raises SpecError where no kind can be drawn, OptiGPUError where the folder cannot be written.
    """
    if not report.results:
        raise SpecError(
            "The report has no result to draw; run `optigpu ladder --model preset:gpt2 --stack int8_weight_only` first."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    written = list(_written(report, folder))
    if not any(each.files for each in written):
        reasons = " ".join(f"{each.name}: {each.reason}" for each in written)
        raise SpecError(f"No chart can be drawn from this report. {reasons}")
    return written


def _written(report: Report, folder: Path) -> Iterator[Written]:
    for name, chart in CHARTS.items():
        try:
            yield Written(name, write_chart(chart, report, folder / name))
        except SpecError as error:
            yield Written(name, reason=str(error))
        except OSError as error:
            raise _unwritable(folder, error) from error


def write_chart(chart: Chart, report: Report, stem: Path) -> tuple[Path, ...]:
    """One chart as SVG and PNG, and its data as JSON. Raises SpecError where there is nothing of that kind, OSError or
    OptiGPUError where the files cannot be written."""
    data, beside = chart.data(report), stem.with_suffix(".json")
    files = [stem.with_suffix(suffix) for suffix in SUFFIXES]
    for file in files:
        write_picture(data, file)
    beside.write_text(data.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return (*files, beside)


def _unwritable(folder: Path, error: OSError) -> OptiGPUError:
    return OptiGPUError(
        f"{folder} cannot be written ({error.strerror}); make it writable, or name another folder."
    )
