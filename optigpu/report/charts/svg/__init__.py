"""Charts as SVG of our own, for pages and for files. `figure` chooses the chart by the data, and adds the table:

    figure(Panel | History | Samples, id_prefix="speed", link=address_of_result) -> Figure(svg, table)

A Panel is drawn by its form, a History (`optigpu.statistics.levels.with_changes`) over time, Samples as a histogram of
each replicate. Each chart is a `Sketch`, which draws itself into a frame of some width, or the reason why there is
nothing to draw. On a page it is inline SVG that Jinja does not escape: a `<div class="c-chart">` with two drawings, for
wide and for narrow places, of which charts.css in this folder shows the one that fits; or a `<p class="c-empty">` with
the reason. All ids begin with `id_prefix`, which has to differ between the charts of a page. `link` is given the id of
a result and answers with the address of its page, or None. There is no style, no script and nothing from elsewhere in
it. A parent that shrinks to its content (a flex item, a float) needs a width. `picture.py` makes a file that stands
alone.
"""

from dataclasses import dataclass

from optigpu.documents.views import History
from optigpu.report.charts.marks import Form, Panel, Samples, history_table, panel_table, samples_table
from optigpu.report.charts.svg.bars import bars, histogram
from optigpu.report.charts.svg.history import history
from optigpu.report.charts.svg.markup import Link, Svg, inline
from optigpu.report.charts.svg.points import fronts, lines, roofline
from optigpu.report.formats import Grid

PANELS = {
    Form.BARS: bars,
    Form.FRONT: fronts,
    Form.LOSS: fronts,
    Form.LINES: lines,
    Form.ROOFLINE: roofline,
}
"""The chart of each form of a panel."""


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


__all__ = ["PANELS", "Figure", "Link", "Svg", "figure"]
