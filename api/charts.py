"""Charts for pages. `figure` chooses the chart by the data, and adds the table:

    figure(Panel | History | Samples, id_prefix="speed", link=address_of_result) -> Figure(svg, table)

A Panel is drawn by its form, as in a file; a History (`optigpu.statistics.changes.with_changes`) over time, Samples as
a histogram of each replicate. On a page a chart is inline SVG that Jinja does not escape: a `<div class="c-chart">`
with two drawings, for wide and for narrow places, of which charts.css shows the one that fits; or a `<p
class="c-empty">` with the reason why there is none. All ids begin with `id_prefix`, which has to differ between the
charts of a page.
`link` is given the id of a result and answers with the address of its page, or None. There is no style, no script and
nothing from elsewhere in it. A parent that shrinks to its content (a flex item, a float) needs a width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from api.histograms import Samples, histogram, samples_table
from optigpu.documents.views import History, HistoryPoint, LevelChange
from optigpu.report.charts.marks import Mark, Panel, reasons
from optigpu.report.charts.svg import PANELS
from optigpu.report.charts.svg.markup import (
    SIZE,
    SMALL,
    Drawing,
    Frame,
    Link,
    Sketch,
    Svg,
    element,
    escaped,
    group,
    line,
    linked,
    number,
    path,
    text,
    title,
    wrapped,
)
from optigpu.report.charts.svg.plane import (
    LINE,
    Extent,
    Plane,
    Scale,
    Tick,
    drawable,
    gutter,
    keep_apart,
    label_width,
    whisker,
)
from optigpu.report.formats import Column, Grid, interval, short, tabulated
from optigpu.report.rows import heading
from optigpu.vocabulary import Better

MOST_POINTS = 200
"""The newest of them are drawn; the table has all."""
MOST_DOTS = 40
MOST_CHANGES = 8


def history(found: History, link: Link | None = None) -> Sketch | str:
    """A point for each result, the oldest first. `link` makes points links to their results."""
    points = [each for each in found.points if drawable(each.value)][-MOST_POINTS:]
    if not points:
        return f"{history_title(found)}: there is no valid result to draw yet."
    changes = [each for each in found.changes if each.measured_at >= points[0].measured_at][-MOST_CHANGES:]
    first, last = points[0], points[-1]
    span = (
        f"{heading(found.metric)} of {len(points)} results: {short(first.value)} on {day(first.measured_at)}"
    )
    said = [f"{day(each.measured_at)}: {change_text(each)}" for each in changes]
    return Sketch(
        history_title(found),
        ". ".join([f"{span}, {short(last.value)} on {day(last.measured_at)} (UTC)", *said]),
        lambda frame: _drawing(found, points, changes, frame, link),
    )


def _drawing(
    found: History,
    points: Sequence[HistoryPoint],
    changes: Sequence[LevelChange],
    frame: Frame,
    link: Link | None,
) -> Drawing:
    """A point for each result; of many the line alone."""
    plane = _plane(found, points, frame)
    places = [plane.at(each.measured_at.timestamp(), each.value) for each in points]
    crosses = (
        whisker(each.ci, plane.y, x, upright=True) for each, (x, _) in zip(points, places, strict=True)
    )
    dots: list[Svg] = []
    for each, (x, y) in zip(points, places, strict=True):
        said = f"{day(each.measured_at)}: {short(each.value)} {heading(found.metric)}"
        dot = element("circle", title(said), cx=x, cy=y, r=3.5, class_="c-point c-s1")
        dots.append(linked(link, each.result_id, said, dot))
    lines: list[Svg] = []
    for change in changes:
        at = plane.x(change.measured_at.timestamp())
        said = title(f"{day(change.measured_at)}: {change_text(change)}")
        lines.append(group(f"c-change {_look(change)}", said, line(at, plane.top, at, plane.bottom)))
    listed, height = _listed(changes, frame, plane.height + 6)
    better = "↑ better" if found.better is Better.HIGHER else "↓ better"
    parts = (
        *plane.axes(),
        text(frame.width, 11, better, class_="c-faint", anchor="end"),
        group("c-crosses", *crosses, hidden=True),
        path(places, "c-line c-s1"),
        *lines,
        *(dots if len(dots) <= MOST_DOTS else ()),
        listed,
    )
    return Drawing(height, parts)


def _plane(found: History, points: Sequence[HistoryPoint], frame: Frame) -> Plane:
    y = Extent(
        tuple(each.value for each in points),
        tuple(bound for each in points for bound in each.ci or ()),
        loose=True,
    )
    top, times = LINE + 8, [each.measured_at for each in points]
    upright = y.scale(top + (200.0 if frame.is_narrow else 240.0), top, most=6, upright=True)
    across = time_axis(times, gutter(upright), frame.width - 14, most=5 if frame.is_narrow else 9)
    return Plane(across, upright, time_name(times), heading(found.metric), frame)


def _look(each: LevelChange) -> str:
    return "c-gain" if each.improved else "c-loss"


def _listed(changes: Sequence[LevelChange], frame: Frame, y: float) -> tuple[Svg, float]:
    """The changes in words below the plot."""
    parts: list[str] = []
    for each in changes:
        parts.append(text(0, y + 11, "▲" if each.improved else "▼", class_=_look(each)))
        whole = f"{day(each.measured_at)[:10]}: {change_text(each)}"
        for words in wrapped(whole, frame.width - 20, 2, SMALL):
            parts.append(text(16, y + 11, words))
            y += LINE
    return group("c-changes", *parts), y


HOUR, DAY = 3600, 86400
_STEPS = (1, 5, 30, 60, 300, 1800, HOUR, 3 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY)
"""Seconds between ticks; more are months."""
_MONTHS = (1, 3, 12, 24, 60, 120, 600, 4800)
EDGE = 13.0
"""How far a label may reach beyond the axis."""


def time_axis(moments: Sequence[datetime], start: float, end: float, *, most: int) -> Scale:
    """From a little before the first moment to a little after the last; ticks lie inside. At least one is labelled."""
    seconds = [moment.timestamp() for moment in moments]
    low, high = min(seconds), max(seconds)
    room = (high - low) * 0.02 or 1800.0
    low, high = low - room, high + room
    for ticks in _choices(low, high):
        scale = Scale(low, high, start, end, ticks)
        places = [(scale(tick.value), label_width(tick.text) / 2) for tick in ticks]
        is_inside = all(start - EDGE <= at - half and at + half <= end + EDGE for at, half in places)
        if ticks and len(ticks) <= most and is_inside and keep_apart(scale, label_width):
            return scale
    middle = (low + high) / 2
    return Scale(low, high, start, end, (Tick(middle, f"{_utc(middle):%Y-%m-%d}"),))


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _choices(low: float, high: float) -> Iterator[tuple[Tick, ...]]:
    """Ticks from the closest to the widest."""
    for step in _STEPS:
        if (high - low) / step < 50:
            first = int(low // step + 1) * step
            yield tuple(Tick(at, _text(_utc(at), step)) for at in range(first, int(high) + 1, step))
    for months in _MONTHS:
        first, last = _utc(low).year * 12 // months * months, _utc(high).year * 12 + 12
        begins = (divmod(count, 12) for count in range(max(12, first), last, months))
        ticks = (datetime(year, month + 1, 1, tzinfo=UTC) for year, month in begins)
        yield tuple(
            Tick(at.timestamp(), f"{at:%Y}" if at.month == 1 else f"{at:%b}")
            for at in ticks
            if low <= at.timestamp() <= high
        )


def _text(moment: datetime, step: int) -> str:
    if step >= DAY or (moment.hour, moment.minute, moment.second) == (0, 0, 0):
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M:%S}" if step < 60 else f"{moment:%H:%M}"


def time_name(moments: Sequence[datetime]) -> str:
    """The name of the axis: with the day where all moments are of one."""
    days = {f"{moment.astimezone(UTC):%Y-%m-%d}" for moment in moments}
    return f"time on {days.pop()} (UTC)" if len(days) == 1 else "date (UTC)"


def day(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"


MOST_VERSIONS = 3
"""Packages that a change names."""


def history_table(history: History) -> Grid:
    """A row for each result, the newest first; a change of the level is written beside the first result after it."""
    changes = {each.result_id: change_text(each) for each in history.changes}
    grid = tabulated(
        history_title(history),
        history.points[::-1],
        {
            "measured (UTC)": lambda each: f"{each.measured_at:%Y-%m-%d %H:%M}",
            f"{heading(history.metric)}:": lambda each: short(each.value),
            "95% interval:": lambda each: interval(each.ci),
            "change": lambda each: changes.get(each.result_id, ""),
            "warnings": lambda each: ", ".join(each.warnings),
        },
    )
    return grid.without_empty_columns()


def history_title(history: History) -> str:
    return f"{history.label} on {history.hardware}"


def change_text(change: LevelChange) -> str:
    """`12.1% higher (worse): torch 2.12 → 2.13`."""
    size = f"{abs(change.ratio - 1):.1%} {'higher' if change.ratio > 1 else 'lower'}"
    named = [f"{name} {old or 'none'} → {new or 'none'}" for name, (old, new) in change.versions.items()]
    more = len(named) - MOST_VERSIONS
    what = ", ".join(named[:MOST_VERSIONS] + ([f"{more} more versions"] if more > 0 else []))
    return f"{size} ({'better' if change.improved else 'worse'}): {what or 'no version changed'}"


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
