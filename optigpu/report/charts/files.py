"""Writes every chart that a report has the figures for: SVG and PNG, and the data as JSON beside them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optigpu.report.charts import CHARTS
from optigpu.report.charts.marks import Report
from optigpu.vocabulary import OptiGPUError, SpecError

PICTURES = (".svg", ".png")


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
        files = tuple(folder / f"{name}{suffix}" for suffix in PICTURES)
        try:
            for file in files:
                chart.draw(report, file)
        except SpecError as error:
            yield Written(name, reason=str(error))
            continue
        beside = folder / f"{name}.json"
        try:
            beside.write_text(chart.data(report).model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield Written(name, (*files, beside))


def _unwritable(folder: Path, error: OSError) -> OptiGPUError:
    return OptiGPUError(
        f"{folder} cannot be written ({error.strerror}); make it writable, or name another folder."
    )
