"""Intervals as lines with a cap at each end, or with an arrow where the axis ends before they do."""

from optigpu.report.charts.marks import Interval
from optigpu.report.charts.svg.markup import Svg, element, number
from optigpu.report.charts.svg.scales import Scale, drawable

CAP = 4.0


def whisker(ci: Interval | None, scale: Scale, at: float, *, upright: bool = False, cap: float = CAP) -> Svg:
    """Along the scale, at a place of the other axis; nothing where there is no interval."""
    if ci is None or not drawable(*ci):
        return Svg("")
    low, high = scale(ci[0]), scale(ci[1])
    whole = _stroke((low, at), (high, at), upright)
    ends = _end(low, scale.start, scale.end, at, upright, cap, beyond=ci[0] < scale.low * (1 - 1e-9))
    ends += _end(high, scale.end, scale.start, at, upright, cap, beyond=ci[1] > scale.high * (1 + 1e-9))
    return element("path", d=whole + ends, class_="c-ci")


def _end(
    place: float, edge: float, other_edge: float, at: float, upright: bool, cap: float, *, beyond: bool
) -> str:
    """A cap, or an arrow that points beyond the edge."""
    if not beyond:
        return _stroke((place, at - cap), (place, at + cap), upright)
    back = edge + (cap if other_edge > edge else -cap)
    return _stroke((back, at - cap), (edge, at), upright) + _stroke((edge, at), (back, at + cap), upright)


def _stroke(start: tuple[float, float], end: tuple[float, float], upright: bool) -> str:
    (x1, y1), (x2, y2) = (start[::-1], end[::-1]) if upright else (start, end)
    from_x, from_y, to_x, to_y = number(x1), number(y1), number(x2), number(y2)
    if from_y == to_y:
        return f"M{from_x},{from_y}H{to_x}"
    return f"M{from_x},{from_y}" + (f"V{to_y}" if from_x == to_x else f"L{to_x},{to_y}")
