"""Charts for pages. `figure` chooses the chart by the data, and adds the table:

    figure(Panel | History | Samples, id_prefix="speed", link=address_of_result) -> Figure(svg, table)

A Panel is drawn by its form, as in a file; a History (`optigpu.statistics.levels.with_changes`) over time, Samples as a
histogram of each replicate. On a page a chart is inline SVG that Jinja does not escape: a `<div class="c-chart">` with
two drawings, for wide and for narrow places, of which charts.css shows the one that fits; or a `<p class="c-empty">`
with the reason why there is none. All ids begin with `id_prefix`, which has to differ between the charts of a page.
`link` is given the id of a result and answers with the address of its page, or None. There is no style, no script and
nothing from elsewhere in it. A parent that shrinks to its content (a flex item, a float) needs a width.
"""

from collections.abc import Callable
from dataclasses import dataclass

from api.charts.history import history, history_table
from api.charts.samples import Samples, histogram, samples_table
from optigpu.documents.views import History
from optigpu.report.charts.marks import Mark, Panel, reasons
from optigpu.report.charts.svg import PANELS
from optigpu.report.charts.svg.markup import SIZE, Frame, Link, Sketch, Svg, element, escaped, number
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import interval, short

WIDE, NARROW = Frame("wide", 720.0), Frame("narrow", 340.0)


@dataclass(frozen=True)
class Figure:
    """A chart for a page, and the table with the same data."""

    svg: Svg
    table: Grid

    @property
    def title(self) -> str:
        return self.table.title


def figure(data: Panel | History | Samples, *, id_prefix: str, link: Link | None = None) -> Figure:
    """The chart that shows the data, and its table."""
    if isinstance(data, History):
        return Figure(inline(history(data, link), id_prefix), history_table(data))
    if isinstance(data, Samples):
        return Figure(inline(histogram(data), id_prefix), samples_table(data))
    return Figure(inline(PANELS[data.form](data, link), id_prefix), panel_table(data))


def inline(sketch: Sketch | str, id_prefix: str) -> Svg:
    """The chart laid out twice, for a wide and for a narrow place: the style sheet shows the one that fits. A text is
    what stands in the place of a chart that has nothing to show."""
    if isinstance(sketch, str):
        return element("p", escaped(sketch), class_="c-empty")
    return element("div", *(_framed(sketch, frame, id_prefix) for frame in (WIDE, NARROW)), class_="c-chart")


def _framed(sketch: Sketch, frame: Frame, id_prefix: str) -> Svg:
    """A drawing with links is a group, since what is inside an image cannot be reached by keyboard."""
    drawn = sketch.draw(frame)
    heading_id, description_id = (f"{id_prefix}-{frame.name}-{part}" for part in ("title", "desc"))
    return element(
        "svg",
        element("title", escaped(sketch.heading) or "Chart", id=heading_id),
        element("desc", escaped(sketch.description), id=description_id),
        *drawn.parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(frame.width)} {number(drawn.height)}",
        class_=f"c-{frame.name}",
        role="group" if any("<a " in part for part in drawn.parts) else "img",
        aria_labelledby=heading_id,
        aria_describedby=description_id,
        font_size=SIZE,
    )


def panel_table(panel: Panel) -> Grid:
    """A row for each mark, and a note for each label that has none. Columns that are empty are left out."""
    columns: list[tuple[str, bool, Callable[[Mark], str]]] = [
        ("rank", True, lambda each: "" if each.rank is None else str(each.rank)),
        ("name", False, lambda each: each.label),
        ("series", False, lambda each: each.series if each.series != each.label else ""),
        ("point", False, lambda each: each.text if panel.x_axis and each.text != each.label else ""),
        ("from", True, lambda each: short(each.start) if each.start else ""),
        (panel.axis, True, lambda each: short(each.value)),
        ("95% interval", True, lambda each: interval(each.ci)),
        ("its roof", True, lambda each: "" if each.limit is None else short(each.limit)),
        (panel.x_axis, True, lambda each: short(each.x) if panel.x_axis else ""),
        ("its 95% interval", True, lambda each: interval(each.x_ci) if panel.x_axis else ""),
        ("on the front", False, lambda each: "yes" if each.on_front else ""),
        ("status", False, lambda each: "claimed" if each.claimed else "" if each.valid else "not valid"),
    ]
    notes = (*(f"{each.text}." for each in panel.roofs), *reasons(panel.missing))
    headings = tuple(Column(words, right) for words, right, _ in columns)
    rows = tuple(tuple(cell(each) for *_, cell in columns) for each in panel.marks)
    faint = frozenset(number for number, each in enumerate(panel.marks) if not each.valid)
    return Grid(panel.title, headings, rows, notes, faint).without_empty_columns()
