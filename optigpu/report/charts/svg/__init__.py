"""Charts as SVG of our own. Each chart is a `Sketch`, which draws itself into a frame of some width, or the reason why
there is nothing to draw. `picture.py` makes a file that stands alone; `api/charts.py` puts charts into pages."""

from optigpu.report.charts.marks import Form
from optigpu.report.charts.svg.bars import bars
from optigpu.report.charts.svg.points import fronts, lines, roofline

PANELS = {
    Form.BARS: bars,
    Form.FRONT: fronts,
    Form.LOSS: fronts,
    Form.LINES: lines,
    Form.ROOFLINE: roofline,
}
"""The chart of each form of a panel."""
