"""Bars from the left with their 95% intervals, one row for each mark; those that share a rank are joined."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from optigpu.report.charts.marks import Mark, Panel
from optigpu.report.charts.svg.markup import (
    TAIL,
    Drawing,
    Frame,
    Link,
    Sketch,
    Svg,
    group,
    line,
    linked,
    rect,
    shortened,
    text,
    text_width,
    title,
    wrapped,
)
from optigpu.report.charts.svg.plane import (
    LINE,
    TICKS_BELOW,
    Scale,
    axis,
    below,
    drawable,
    key,
    label_width,
    lying,
    name_of,
    whisker,
)
from optigpu.report.formats import short

MOST_ROWS = 40
"""Rows of a legible picture; the table has all."""
BAR = 14.0
LONGEST_INTERVAL = 1.8
"""An axis ends at so many times the largest value, and intervals that reach further end in an arrow."""
GUTTER, FIGURES = 0.36, 0.3
"""The largest parts of a drawing that names beside bars, and figures, take."""


def bars(panel: Panel, link: Link | None = None) -> Sketch | str:
    """A row for each mark of the panel. `link` makes the names links to their results."""
    marks = tuple(each for each in panel.marks if drawable(each.value, each.start))
    if not marks:
        return nothing(panel)

    def draw(frame: Frame) -> Drawing:
        shown = marks if frame.alone else marks[:MOST_ROWS]
        return _Bars(frame, panel, shown, link).drawing(len(marks) - len(shown))

    return Sketch(panel.title, spoken(panel, marks), draw)


def reach(marks: Sequence[Mark]) -> tuple[float, float]:
    """The ends of the values' axis."""
    values = [each.value for each in marks]
    low, high = min(0.0, *values), max(0.0, *values)
    bounds = [bound for each in marks if each.ci and drawable(*each.ci) for bound in each.ci]
    room = LONGEST_INTERVAL * (high - low) if high > low else 1.0
    return max(low - room, min(low, *bounds, 0.0)), min(high + room - (high - low), max(high, *bounds, 0.0))


@dataclass(frozen=True)
class _Bars:
    frame: Frame
    panel: Panel
    marks: tuple[Mark, ...]
    link: Link | None

    @property
    def ranks(self) -> float:
        """The width of the ranks."""
        return 34.0 if any(each.rank is not None for each in self.marks) else 0.0

    @property
    def names(self) -> float:
        """The width of the names beside the bars."""
        widest = max(text_width(row_name(each, self.marks)) for each in self.marks)
        return min(widest + 2, GUTTER * self.frame.width)

    def drawing(self, left_out: int) -> Drawing:
        scale = self._scale()
        legend, high = self._key()
        parts: list[str] = [legend]
        tops = [high + 4.0]
        for each in self.marks:
            made, height = self._row(each, scale, tops[-1])
            tops.append(tops[-1] + height)
            parts.append(made)
        axes = lying_axis(scale, high, tops[-1], self.panel.axis, self.frame)
        more, y = more_in_table(left_out, tops[-1] + TICKS_BELOW + LINE)
        # A line beside each run of rows that share a rank.
        found: list[Svg] = []
        rows = list(zip(self.marks, pairwise(tops), strict=True))
        for rank, run in groupby(rows, key=lambda row: row[0].rank):
            several = [ends for _, ends in run]
            if rank is not None and len(several) > 1:
                x = self.ranks - 7
                found.append(line(x, several[0][0] + 3, x, several[-1][1] - 7))
        ties = group("c-ties", *found, hidden=True)
        return Drawing(y, (*axes, *parts, *more, ties))

    def _key(self) -> tuple[Svg, float]:
        """What the colours mean, in a file: a page says it in the table."""
        looks = {
            each.series: look(each.model_copy(update={"valid": True}), self.panel) for each in self.marks
        }
        if not self.frame.alone or not all(looks) or set(looks) <= {each.label for each in self.marks}:
            return Svg(""), 0.0
        classes = list(looks.values())
        return key(
            list(looks),
            self.frame.width,
            sample=lambda x, y, place: group(classes[place], rect(x - 5, y - 5, 10, 10)),
        )

    def _scale(self) -> Scale:
        values = max(text_width(_figure(each, self.frame)) for each in self.marks) + 4
        left = self.ranks if self.frame.is_narrow else self.ranks + self.names + 10
        right = self.frame.width - (12 if self.frame.is_narrow else values + 14)
        low, high = reach(self.marks)
        most = 4 if self.frame.is_narrow else 7
        return lying(
            lambda start, end: axis(low, high, start, end, most=most, size=label_width),
            left + 4,
            right,
            self.frame.width,
        )

    def _row(self, each: Mark, scale: Scale, y: float) -> tuple[Svg, float]:
        """The row's elements and height: the name stands above the bar in a narrow drawing, else beside it."""
        name, figure = row_name(each, self.marks), _figure(each, self.frame)
        room = self.frame.width - self.ranks - text_width(figure) - 12
        room = room if self.frame.is_narrow else self.names
        lines = wrapped(name, room, 8 if self.frame.alone else 2, tail=TAIL)
        more = LINE * (len(lines) - 1)
        if self.frame.is_narrow:
            first = at = y + 12
            top, height = y + 18 + more, 18 + more + BAR + 12
        else:
            height = max(BAR + 12, LINE * len(lines) + 8)
            top = y + (height - BAR) / 2 - 2
            at = top + BAR / 2 + 4
            first = at - more / 2
        names = [text(self.ranks, first + LINE * n, words, class_="c-label") for n, words in enumerate(lines)]
        shared = "=" if sum(other.rank == each.rank for other in self.marks) > 1 else ""
        rank = "" if each.rank is None else text(0, first, f"{each.rank}{shared}", class_="c-rank")
        whole = title(name) if len(names) > 1 or "…" in lines[0] else ""
        linked_names = linked(self.link, each.source, None, whole, *names)
        begin, end = sorted((scale(each.start), scale(each.value)))
        interval = whisker(each.ci, scale, top + BAR / 2)
        bar = group(look(each, self.panel), rect(begin, top, end - begin, BAR), interval)
        value, _, rest = figure.partition(" ")
        figures = text(self.frame.width, at, value, class_="c-value", anchor="end", rest=rest)
        return group("c-row", rank, linked_names, bar, figures), height


def lying_axis(scale: Scale, top: float, bottom: float, name: str, frame: Frame) -> tuple[Svg, Svg]:
    """The axis below rows, with its name at the right end."""
    return below(scale, top, bottom), name_of(name, scale, frame.width, bottom + 30, frame.width)


def more_in_table(left_out: int, y: float) -> tuple[list[Svg], float]:
    """A line below a drawing that says how many marks it leaves out, if it does; and the height of all."""
    if not left_out:
        return [], y
    return [text(0, y + LINE - 6, f"{left_out} more are in the table.", class_="c-faint")], y + LINE


def look(each: Mark, panel: Panel) -> str:
    """The classes of a bar."""
    if each.claimed:
        return "c-bar c-claimed"
    number = list(dict.fromkeys(other.series for other in panel.marks)).index(each.series) % 6 + 1
    kind = "c-plain" if each.series == "baseline" else f"c-s{number}"
    return f"c-bar {kind}" if each.valid else f"c-bar {kind} c-invalid"


def _figure(each: Mark, frame: Frame) -> str:
    share = 0.55 if frame.is_narrow or frame.alone else FIGURES
    return shortened(each.text or short(each.value), share * frame.width)


LONGEST_REASON = 1500.0
NAMED = 3
"""Marks that a description names; the table has all."""
LONGEST_NAME = 400.0


def nothing(panel: Panel) -> str:
    """Why a panel has nothing to show."""
    reasons = "; ".join(dict.fromkeys(panel.missing.values()))
    if reasons:
        return f"{panel.title}: there is nothing to draw. Reason: {shortened(reasons, LONGEST_REASON)}"
    if panel.marks:
        return f"{panel.title}: there is nothing to draw, because no value is a finite number."
    return f"{panel.title}: there is no result to draw yet."


def spoken(panel: Panel, marks: Sequence[Mark]) -> str:
    """What the chart shows and its first marks."""
    named = [
        f"{shortened(each.label, LONGEST_NAME)} {each.text or short(each.value)}" for each in marks[:NAMED]
    ]
    more = f"; {len(marks) - NAMED} more" if len(marks) > NAMED else ""
    over = f" over {panel.x_axis}" if panel.x_axis else ""
    return (
        f"{panel.axis}{over}: {'; '.join(named)}{more}. Lines are 95% intervals. The table has all figures."
    )


def row_name(each: Mark, marks: Sequence[Mark]) -> str:
    """The label, with the series where several marks have that label."""
    several = sum(other.label == each.label for other in marks) > 1
    return f"{each.label}, {each.series}" if several and each.series else each.label
