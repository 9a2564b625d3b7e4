"""Charts as SVG of our own, for pages and for files.

`figure` chooses the chart by the data, and adds the table:

    figure(Panel | Steps | Timeline | Samples, id_prefix="speed", link=address_of_result) -> Figure(title, svg, table)

| data | from | chart |
| --- | --- | --- |
| Panel of the form `bars` | `CHARTS[name].data(report).panels` | bars with intervals, ties |
| Panel of the form `front` or `loss` | `CHARTS["pareto"]`, `boards.front_panel` | points, their front |
| Panel of the form `lines` | `CHARTS["batches"]`, `"loads"`, `"lengths"`, `"throughput"` | joined points |
| Panel of the form `roofline` | `CHARTS["roofline"]` | points below the roofs |
| Steps | `steps_data(report)` | the ladder as a waterfall |
| Timeline | `history_data(with_changes(history))` | a history with its changes |
| Samples | `samples_data(title, axis, samples)` | a histogram of each replicate |

Each chart is a `Sketch`, which draws itself into a frame of some width, or the reason why there is nothing to draw. On
a page it is inline SVG that Jinja does not escape, `{{ chart.svg }}`: a `<div class="c-chart">` with two drawings, for
wide and for narrow places, of which charts.css in this folder shows the one that fits; or a `<p class="c-empty">` with
the reason. All ids begin with `id_prefix`, which has to differ between the charts of a page. `link` is given the id of
a result and answers with the address of its page, or None. There is no style, no script and nothing from elsewhere in
it. The `<div>` takes the width that its parent gives: a parent that shrinks to its content (a flex item, a float) needs
a width. `picture.py` makes a file that stands alone.
"""

from dataclasses import dataclass
from typing import assert_never

from optigpu.report.charts.history import Samples, Timeline
from optigpu.report.charts.ladders import Steps
from optigpu.report.charts.marks import Form, Panel
from optigpu.report.charts.svg.bars import bars
from optigpu.report.charts.svg.history import histogram, history
from optigpu.report.charts.svg.markup import Link, Sketch, Svg, inline
from optigpu.report.charts.svg.points import fronts, lines
from optigpu.report.charts.svg.roofline import roofline
from optigpu.report.charts.svg.waterfall import waterfall
from optigpu.report.charts.tables import panel_table, samples_table, steps_table, timeline_table
from optigpu.report.formats import Grid

Data = Panel | Steps | Timeline | Samples
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

    title: str
    svg: Svg
    table: Grid


def figure(data: Data, *, id_prefix: str, link: Link | None = None) -> Figure:
    """The chart that shows the data, and its table."""
    sketch: Sketch | str
    match data:
        case Steps():
            sketch, table = waterfall(data, link), steps_table(data)
        case Timeline():
            sketch, table = history(data, link), timeline_table(data)
        case Samples():
            sketch, table = histogram(data), samples_table(data)
        case Panel():
            sketch, table = PANELS[data.form](data, link), panel_table(data)
        case _:
            assert_never(data)
    return Figure(data.title, inline(sketch, id_prefix), table)


__all__ = ["PANELS", "Data", "Figure", "Link", "Svg", "figure"]
