"""The comparison table as a picture: a column for each variant, a row for each figure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from optigpu.documents.result import AttributionRow
from optigpu.report.canvas import INK, sheet
from optigpu.report.charts.marks import ChartData, Report, Table
from optigpu.report.charts.metrics import figure_of, first_measured, label_of, primary_of
from optigpu.report.charts.quality import LOSSES, loss_of
from optigpu.report.numbers import MISSING, ratio, scaled, short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, Role, SpecError

FIGURES: tuple[tuple[str, str, float], ...] = (
    ("latency (ms)", "latency_s", 1e3),
    ("training step (ms)", "step_s", 1e3),
    ("peak memory (MB)", "peak_bytes", 1e-6),
    ("weights (MB)", "weight_bytes", 1e-6),
    ("memory bandwidth used (%)", "mbu", 100.0),
    ("matrix rate used (%)", "mfu", 100.0),
    ("energy (J)", "energy_j", 1.0),
)
"""Heading, metric and scale of a row; a row without any figure is left out."""
MOST_COLUMNS = 8
"""Variants of a legible picture; the table of `optigpu show` has all."""
HEADING_WIDTH = 20


def comparison_data(report: Report) -> ChartData:
    """The first variants of the plan. Raises SpecError where none has its primary figure."""
    measured = [each for each in report.results if primary_of(each)["value"] is not None]
    if not measured:
        raise SpecError(
            "No result has a figure for a table; run `optigpu ladder --model preset:gpt2 --stack int8_weight_only`."
        )
    shown, left = measured[:MOST_COLUMNS], measured[MOST_COLUMNS:]
    more = f" Left out: {', '.join(label_of(each) for each in left)}." if left else ""
    return ChartData(
        title=report.title,
        table=Table(headings=("", *(label_of(each) for each in shown)), rows=tuple(_rows(shown, report))),
        note=f'"{MISSING}" was not measured; `optigpu show` prints the reasons. ± and [ ] are 95% intervals.{more}',
        origin=origin_line(shown),
    )


def _rows(shown: Sequence[Document], report: Report) -> list[tuple[str, ...]]:
    rows = report.attribution.rows if report.attribution else ()
    gains = {row.index: row for row in rows}
    loss = first_measured(shown, tuple(LOSSES))
    lines = [
        _row(
            heading(shown[0]["variant"]["primary_metric"]),
            shown,
            lambda each: with_interval(primary_of(each)),
        ),
        _row("speedup", shown, lambda each: _speedup(each, gains)),
        *(_figures(name, shown, metric, scale) for name, metric, scale in FIGURES),
        _row("quality lost (%)", shown, lambda each: _loss(each, loss)),
    ]
    return [line for line in lines if set(line[1:]) != {MISSING}]


def _row(name: str, shown: Sequence[Document], cell: Callable[[Document], str]) -> tuple[str, ...]:
    return (name, *(cell(each) for each in shown))


def _figures(name: str, shown: Sequence[Document], metric: str, scale: float) -> tuple[str, ...]:
    return _row(name, shown, lambda each: scaled(figure_of(each, metric), scale))


def _speedup(result: Document, rows: Mapping[int, AttributionRow]) -> str:
    if result["variant"]["role"] == Role.BASELINE:
        return "1"
    row = rows.get(result["variant"]["index"])
    return ratio(row.speedup) if row else MISSING


def _loss(result: Document, name: str | None) -> str:
    found = loss_of(result, name) if name else None
    return short(found[0]) if found else MISSING


def paint_table(data: ChartData, path: Path) -> None:
    """Raises as `sheet` does."""
    from matplotlib.transforms import Bbox

    table = data.table
    assert table is not None
    headings = [fill(each, HEADING_WIDTH) for each in table.headings]
    tallest = max(each.count("\n") + 1 for each in headings)
    width = 2.2 + 1.75 * (len(headings) - 1)
    height = 0.18 * tallest + 0.34 * len(table.rows)
    footer = "\n".join(filter(None, [data.note, data.origin]))
    with sheet(path, data.title, (width, height + 1.3), (1, 1), footer) as (axes,):
        axes.set_axis_off()
        drawn = axes.table(
            cellText=[list(row) for row in table.rows],
            colLabels=headings,
            cellLoc="right",
            colWidths=[2.2 / width, *[1.75 / width] * (len(headings) - 1)],
            bbox=Bbox.unit(),
        )
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(8.5)
        for (row, column), cell in drawn.get_celld().items():
            cell.set(edgecolor=INK, linewidth=0.5)
            if row == 0:
                cell.set(height=0.18 * tallest / height, facecolor="#e4e4e4")
                cell.get_text().set_fontweight("bold")
            else:
                cell.set(height=0.34 / height)
            if column == 0:
                cell.get_text().set_horizontalalignment("left")
