"""Points: each series has a colour and a shape, so that either alone tells them apart."""

from optigpu.report.charts.svg.markup import Svg, element, number

SERIES = 6
"""Colours of api/static/charts.css. There is one shape fewer, so that a pair repeats after 30 series."""
RADIUS = 5.0


def point(x: float, y: float, series: int, *, valid: bool = True, faint: bool = False) -> Svg:
    """Hollow if it is not valid, small if it is faint."""
    radius = RADIUS * (0.8 if faint else 1.0)
    names = [f"c-point c-s{series % SERIES + 1}", "" if valid else "c-invalid", "c-off" if faint else ""]
    class_ = " ".join(filter(None, names))
    shape = _SHAPES[series % len(_SHAPES)]
    if shape is None:
        return element("circle", cx=x, cy=y, r=radius, class_=class_)
    corners = " ".join(f"{number(x + radius * across)},{number(y + radius * down)}" for across, down in shape)
    return element("polygon", points=corners, class_=class_)


_SHAPES: tuple[tuple[tuple[float, float], ...] | None, ...] = (
    None,
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
)
"""Corners in radii; None is a circle."""
