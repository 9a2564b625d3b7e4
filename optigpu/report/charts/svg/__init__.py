"""Charts as SVG of our own. Each chart is a `Sketch`, which draws itself into a frame of some width, or the reason why
there is nothing to draw. `picture` makes a file that stands alone, with title, panels, note, origin and styles;
`api/charts.py` puts charts into pages."""

import re
from functools import lru_cache
from importlib import resources
from pathlib import Path

from optigpu.report.charts.marks import ChartData, Form, Panel, reasons
from optigpu.report.charts.svg.bars import bars
from optigpu.report.charts.svg.markup import (
    SIZE,
    SMALL,
    Drawing,
    Frame,
    Svg,
    element,
    escaped,
    number,
    text,
    wrapped,
)
from optigpu.report.charts.svg.plane import LINE
from optigpu.report.charts.svg.points import fronts, lines, roofline
from optigpu.vocabulary import OptiGPUError, SpecError

PANELS = {
    Form.BARS: bars,
    Form.FRONT: fronts,
    Form.LOSS: fronts,
    Form.LINES: lines,
    Form.ROOFLINE: roofline,
}
"""The chart of each form of a panel."""


STYLE_SHEET = Path(__file__).with_name("charts.css")
SUFFIXES = (".svg", ".png")
ONE, TWO = Frame("one", 720.0, alone=True), Frame("two", 560.0, alone=True)
"""Of a panel that stands alone, and of one of two in a row."""
MARGIN, GAP = 20.0, 36.0
BOLD = 1.08
"""How much wider bold letters are."""
TITLE, HEADING = 16.0, 13.0
MOST_LINES = 40
"""Of a text around the panels."""
FAMILY = "Inter, DejaVu Sans, sans-serif"
PIXELS = 2.0
"""Of a PNG, for each unit of the drawing."""


def write_picture(data: ChartData, file: Path) -> None:
    """Raises SpecError for another suffix than those of SUFFIXES, OptiGPUError when the file cannot be written."""
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise SpecError(f"{file} must end with {' or '.join(SUFFIXES)}, the formats of charts.")
    drawn = picture(data)
    try:
        file.write_bytes(png(drawn, PIXELS) if suffix == ".png" else f"{drawn}\n".encode())
    except OSError as error:
        raise OptiGPUError(f"{file} cannot be written: {error.strerror}.") from error


def png(svg: str, zoom: float = 1.0) -> bytes:
    """With the one font that comes with OptiGPU, so that a picture looks the same everywhere."""
    from resvg_py import svg_to_bytes  # here, because it is seldom needed

    return bytes(
        svg_to_bytes(
            svg_string=svg, zoom=zoom, skip_system_fonts=True, font_files=_fonts(), font_family="Inter"
        )
    )


@lru_cache(maxsize=1)
def _fonts() -> list[str]:
    folder = Path(str(resources.files("fontpkg_inter"))) / "files"
    return [str(file) for file in sorted(folder.glob("*.ttf"))]


def picture(data: ChartData) -> Svg:
    """The chart as SVG."""
    width, drawings = _content(data)
    parts: list[str] = []
    y = MARGIN
    for words in wrapped(data.title, width, MOST_LINES, TITLE * BOLD):
        parts.append(text(0, y + TITLE - 4, words, class_="c-head"))
        y += TITLE * 1.3
    y += 10
    for row in drawings:
        placed = [(place * (width + GAP) / len(row), each) for place, each in enumerate(row)]
        parts += [_moved(each, x, y) for x, each in placed]
        y += max(each.height for each in row) + 14
    for said in filter(None, [data.note, data.origin]):
        lines, high = _faint(said, width, y)
        parts += lines
        y += high
    whole, height = width + 2 * MARGIN, y + MARGIN - 8
    return element(
        "svg",
        element("title", escaped(data.title)),
        element("style", _styles()),
        element("rect", width=whole, height=height, fill="#ffffff"),
        element("g", *parts, transform=f"translate({number(MARGIN)},0)"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(whole)} {number(height)}",
        width=whole,
        height=height,
        class_="c-chart",
        role="img",
        font_family=FAMILY,
        font_size=SIZE,
    )


@lru_cache(maxsize=1)
def _styles() -> str:
    """The rules of the style sheet with the colours of its light theme: not every program knows its variables."""
    sheet = STYLE_SHEET.read_text(encoding="utf-8")
    values = {"series": "currentColor"}
    for name, value in re.findall(r"^  --(chart-[\w-]+): (.+);$", sheet, re.MULTILINE):
        colour = re.search(r"#\w+", value)
        values[name] = colour[0] if colour else values[value.removeprefix("var(--").removesuffix(")")]
    rules = re.findall(r"^\.c-chart [^{:]*\{[^}]*\}", sheet, re.MULTILINE)
    inherited = " ".join(" ".join(rules).replace("--series:", "color:").split())
    return re.sub(r"var\(--([\w-]+)\)", lambda found: values[found[1]], inherited)


def _moved(drawn: Drawing, x: float, y: float) -> Svg:
    return element("g", *drawn.parts, transform=f"translate({number(x)},{number(y)})")


def _faint(words: str, width: float, y: float) -> tuple[list[Svg], float]:
    """Lines of small text from `y` down, and how high they are."""
    lines = wrapped(words, width, MOST_LINES, SMALL) if words else []
    parts = [text(0, y + LINE * n + 11, each, class_="c-faint") for n, each in enumerate(lines)]
    return parts, LINE * len(lines)


def _content(data: ChartData) -> tuple[float, list[list[Drawing]]]:
    """The width of what is shown, and its rows."""
    if len(data.panels) == 1:
        return ONE.width, [[_panel(data.panels[0], ONE)]]
    drawings = [_panel(each, TWO) for each in data.panels]
    return 2 * TWO.width + GAP, [drawings[place : place + 2] for place in range(0, len(drawings), 2)]


def _panel(panel: Panel, frame: Frame) -> Drawing:
    """Its title, its chart or the reason why there is none, and what it does not show."""
    words = panel.title[:1].upper() + panel.title[1:]
    heading = text(0, HEADING, words, class_="c-panel", width=frame.width, size=HEADING * BOLD)
    top = HEADING + 10
    sketch = PANELS[panel.form](panel)
    if isinstance(sketch, str):
        lines, high = _faint(sketch, frame.width, top)
        return Drawing(top + high, (heading, *lines))
    drawn = sketch.draw(frame)
    missing = f"Not shown: {'; '.join(reasons(panel.missing))}." if panel.missing else ""
    lines, high = _faint(missing, frame.width, top + drawn.height + 4)
    return Drawing(top + drawn.height + high + 4, (heading, _moved(drawn, 0, top), *lines))
