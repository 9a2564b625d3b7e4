"""A chart as a file that stands alone: its title, panels, table or boxes, note and origin, with the styles inside."""

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path

from optigpu.report.charts.marks import Box, ChartData, Panel, Table, reasons
from optigpu.report.charts.svg import PANELS
from optigpu.report.charts.svg.markup import (
    SIZE,
    SMALL,
    Drawing,
    Frame,
    Svg,
    element,
    escaped,
    group,
    line,
    number,
    path,
    rect,
    text,
    text_width,
    wrapped,
)
from optigpu.report.charts.svg.plane import LINE
from optigpu.vocabulary import OptiGPUError, SpecError

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
    if data.table:
        return _table(data.table)
    if data.boxes:
        return _diagram(data.boxes)
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


LEAST, MOST = 90.0, 200.0
"""The widths of the columns of a table."""
PAD = 10.0


def _table(table: Table) -> tuple[float, list[list[Drawing]]]:
    """A line below each row; figures end at the right."""
    columns = zip(table.headings, *table.rows, strict=True)
    widths: list[float] = []
    for heading, *cells in columns:  # wide enough for each cell and for each word of the heading
        words = (text_width(each, SMALL * BOLD) for each in heading.split())
        widths.append(min(MOST, max(LEAST, *words, *(text_width(each, SMALL) for each in cells)) + PAD))
    ends = [sum(widths[: place + 1]) for place in range(len(widths))]
    headings = [
        wrapped(words, wide - PAD, MOST_LINES, SMALL * BOLD)
        for words, wide in zip(table.headings, widths, strict=True)
    ]
    parts: list[str] = []
    for lines, end in zip(headings, ends, strict=True):
        parts += [
            text(end, LINE * (row + 1), words, class_="c-cell c-column", anchor="end")
            for row, words in enumerate(lines)
        ]
    y = LINE * max(map(len, headings)) + 8
    for name, *cells in table.rows:
        parts.append(line(0, y, ends[-1], y))
        y += LINE + 8
        parts.append(text(0, y - 8, name, class_="c-cell", width=widths[0], size=SMALL))
        parts += [
            text(end, y - 8, cell, class_="c-cell", anchor="end", width=wide, size=SMALL)
            for cell, end, wide in zip(cells, ends[1:], widths[1:], strict=True)
        ]
    return max(ONE.width, ends[-1]), [[Drawing(y, (group("c-table", *parts),))]]


ARROW = 30.0
"""Between two levels of a diagram."""


def _diagram(boxes: Sequence[Box]) -> tuple[float, list[list[Drawing]]]:
    """Levels from the top, joined by arrows."""
    levels = [[box for box in boxes if box.level == level] for level in sorted({box.level for box in boxes})]
    width = max(ONE.width, 190.0 * max(map(len, levels)))
    parts: list[str] = []
    y = 0.0
    for place, level in enumerate(levels):
        wide = (width + PAD) / len(level) - PAD
        drawn = [
            [each for words in box.lines for each in wrapped(words, wide - 2 * PAD, 4, SMALL)]
            for box in level
        ]
        high = LINE * (max(map(len, drawn)) + 1) + 12
        for column, (box, lines) in enumerate(zip(level, drawn, strict=True)):
            left = column * (wide + PAD)
            parts.append(_box(box.heading, lines, place, (left, y, wide, high)))
            if place + 1 < len(levels):
                middle, end = left + wide / 2, y + high + ARROW - 3
                parts.append(line(middle, y + high + 3, middle, end, "c-arrow"))
                parts.append(path([(middle - 4, end - 6), (middle, end), (middle + 4, end - 6)], "c-arrow"))
        y += high + ARROW
    return width, [[Drawing(y - ARROW, tuple(parts))]]


def _box(heading: str, lines: Sequence[str], level: int, place: tuple[float, float, float, float]) -> Svg:
    x, y, width, _ = place
    middle, room = x + width / 2, width - PAD
    return group(
        f"c-box c-s{level + 1}",
        rect(*place),
        text(middle, y + LINE, heading, class_="c-label", anchor="middle", width=room, size=SMALL * BOLD),
        *(text(middle, y + LINE * (row + 2), words, anchor="middle") for row, words in enumerate(lines)),
    )
