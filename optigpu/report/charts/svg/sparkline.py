"""A history as one small line, for a cell of a table."""

from optigpu.report.charts.history import Timeline
from optigpu.report.charts.svg.markup import Svg, element, path
from optigpu.report.charts.svg.scales import drawable
from optigpu.report.charts.svg.words import escaped
from optigpu.report.numbers import short

WIDTH, HEIGHT, EDGE = 120.0, 28.0, 4.0
MOST = 60


def svg(timeline: Timeline, *, id_prefix: str) -> Svg:
    """The newest values at equal distances, the last with a point. Empty without a value."""
    values = [each.value for each in timeline.moments if drawable(each.value)][-MOST:]
    if not values:
        return Svg("")
    low, high = min(values), max(values)
    step = (WIDTH - 2 * EDGE) / max(1, len(values) - 1)
    span = (high - low) or 1.0
    places = [
        (
            EDGE + step * number,
            HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * ((value - low) / span if high > low else 0.5),
        )
        for number, value in enumerate(values)
    ]
    heading_id = f"{id_prefix}-title"
    said = (
        f"{timeline.axis} of {len(values)} results: from {short(values[0])} to {short(values[-1])}, "
        f"between {short(low)} and {short(high)}"
    )
    last = element("circle", cx=places[-1][0], cy=places[-1][1], r=2.5, class_="c-point c-s1")
    return element(
        "svg",
        element("title", escaped(said), id=heading_id),
        path(places, "c-line c-s1"),
        last,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        class_="c-spark",
        role="img",
        aria_labelledby=heading_id,
    )
