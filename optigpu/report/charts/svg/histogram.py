"""How the samples of each replicate are spread: a row of columns for each, over one axis, with its median."""

from dataclasses import dataclass

from optigpu.report.charts.samples import Counted, Samples
from optigpu.report.charts.svg.axes import LINE, TICKS_BELOW, below, label_width, lying, name_below
from optigpu.report.charts.svg.markup import (
    Drawing,
    Frame,
    Svg,
    chart,
    element,
    group,
    line,
    number,
    sentence,
    text,
    title,
)
from optigpu.report.charts.svg.scales import Scale, axis, drawable
from optigpu.report.charts.svg.words import shortened, text_width
from optigpu.report.numbers import short

MOST_ROWS = 12
ROW, COLUMNS = 66.0, 42.0
"""The height of a row, and of the highest column in it."""


def svg(samples: Samples, *, id_prefix: str) -> Svg:
    """A row for each replicate; the columns of all rows have one scale."""
    rows = samples.replicates[:MOST_ROWS]
    if not rows or not drawable(samples.edges[0], samples.edges[-1]):
        return sentence(f"{samples.title}: there is no sample to draw.")
    medians = ", ".join(short(each.median) for each in rows)
    return chart(
        lambda frame: _Histogram(frame, samples, rows).drawing(len(samples.replicates) - len(rows)),
        heading=samples.title,
        description=f"{samples.axis} of {sum(each.n for each in rows)} samples in {len(rows)} replicates with the "
        f"medians {medians}. The table has the counts.",
        id_prefix=id_prefix,
    )


@dataclass(frozen=True)
class _Histogram:
    frame: Frame
    samples: Samples
    rows: tuple[Counted, ...]

    def drawing(self, left_out: int) -> Drawing:
        scale = self._scale()
        most = max(max(each.counts) for each in self.rows) or 1
        bottom = ROW * len(self.rows) + 4
        parts: list[str] = [below(scale, 0.0, bottom)]
        parts += [self._row(place, each, scale, most) for place, each in enumerate(self.rows)]
        parts.append(name_below(self.samples.axis, scale, self.frame.width, bottom + 30, self.frame.width))
        height = bottom + TICKS_BELOW + LINE
        if left_out:
            height += LINE
            parts.append(text(0, height - 5, f"{left_out} more are in the table.", class_="c-faint"))
        return Drawing(height, tuple(parts))

    def _scale(self) -> Scale:
        edges, most = self.samples.edges, 5 if self.frame.is_narrow else 9
        return lying(
            lambda start, end: axis(edges[0], edges[-1], start, end, most=most, size=label_width),
            4.0,
            self.frame.width - 4,
            self.frame.width,
        )

    def _row(self, place: int, each: Counted, scale: Scale, most: int) -> Svg:
        """The name and the median stand above the columns."""
        top = ROW * place
        base = top + ROW - 2
        beyond = f", {each.beyond} beyond" if each.beyond else ""
        said = shortened(f"median {short(each.median)} of {each.n}{beyond}", self.frame.width - 60)
        room = self.frame.width - text_width(said) - 10
        median = scale(each.median)
        return group(
            "c-row",
            title(f"{each.label}: {said}"),
            element("path", d=self._columns(each, scale, most, base), class_="c-columns c-s1"),
            line(scale.start, base, scale.end, base, "c-base"),
            line(median, base - COLUMNS - 3, median, base, "c-median"),
            text(0, top + 13, each.label, class_="c-label", width=max(20.0, room)),
            text(self.frame.width, top + 13, said, class_="c-rest", anchor="end"),
        )

    def _columns(self, each: Counted, scale: Scale, most: int, base: float) -> str:
        """The outline of the columns, from the left to the right."""
        parts = [f"M{number(scale(self.samples.edges[0]))},{number(base)}"]
        for count, edge in zip(each.counts, self.samples.edges[1:], strict=True):
            parts.append(f"V{number(base - COLUMNS * count / most)}H{number(scale(edge))}")
        return "".join([*parts, f"V{number(base)}"])
