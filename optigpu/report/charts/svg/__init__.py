"""Charts for pages: inline SVG of the same data that `optigpu chart` draws into files. matplotlib is not imported.

Each module has one chart: `svg(data, *, id_prefix, link=None)`. `figure` chooses by the data, and adds the table:

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

`svg` is a text that Jinja does not escape: `{{ chart.svg }}`. It is a `<div class="c-chart">` with two drawings, for
wide and for narrow places; api/static/charts.css shows the one that fits, and has every class and colour. Where there
is nothing to draw, it is a `<p class="c-empty">` with the reason. All ids begin with `id_prefix`, which has to differ
between the charts of a page. `link` is given the id of a result and answers with the address of its page, or None.
There is no style, no script and nothing from elsewhere in it. The `<div>` takes the width that its parent gives: a
parent that shrinks to its content (a flex item, a float) needs a width.
"""

from dataclasses import dataclass
from typing import assert_never

from optigpu.report.charts.history import Timeline
from optigpu.report.charts.marks import Form, Panel
from optigpu.report.charts.samples import Samples
from optigpu.report.charts.steps import Steps
from optigpu.report.charts.svg import bars, histogram, history, lines, pareto, roofline, waterfall
from optigpu.report.charts.svg.markup import Link, Svg
from optigpu.report.charts.tables import panel_table, samples_table, steps_table, timeline_table
from optigpu.report.formats import Grid

Data = Panel | Steps | Timeline | Samples


PANELS = {
    Form.BARS: bars.svg,
    Form.FRONT: pareto.svg,
    Form.LOSS: pareto.svg,
    Form.LINES: lines.svg,
    Form.ROOFLINE: roofline.svg,
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
    match data:
        case Steps():
            drawn, table = waterfall.svg(data, id_prefix=id_prefix, link=link), steps_table(data)
        case Timeline():
            drawn, table = history.svg(data, id_prefix=id_prefix, link=link), timeline_table(data)
        case Samples():
            drawn, table = histogram.svg(data, id_prefix=id_prefix), samples_table(data)
        case Panel():
            drawn, table = PANELS[data.form](data, id_prefix=id_prefix, link=link), panel_table(data)
        case _:
            assert_never(data)
    return Figure(data.title, drawn, table)


__all__ = ["Data", "Figure", "Link", "Svg", "figure"]
