"""How the samples of each replicate are spread."""

from collections.abc import Sequence

from optigpu.report.charts.samples import Counted, Samples
from optigpu.report.charts.svg.axes import LINE, TICKS_BELOW, Scale, axis, drawable, label_width, lying
from optigpu.report.charts.svg.bars import lying_axis, more_in_table
from optigpu.report.charts.svg.markup import (
    Drawing,
    Frame,
    Sketch,
    Svg,
    element,
    group,
    line,
    number,
    shortened,
    text,
    text_width,
    title,
)
from optigpu.report.numbers import short

MOST_ROWS = 12
ROW, COLUMNS = 66.0, 42.0
"""The height of a row, and of the highest column in it."""


def histogram(samples: Samples) -> Sketch | str:
    """A row for each replicate; the columns of all rows have one scale."""
    rows = samples.replicates[:MOST_ROWS]
    if not rows or not drawable(samples.edges[0], samples.edges[-1]):
        return f"{samples.title}: there is no sample to draw."
    medians = ", ".join(short(each.median) for each in rows)
    return Sketch(
        samples.title,
        f"{samples.axis} of {sum(each.n for each in rows)} samples in {len(rows)} replicates with the "
        f"medians {medians}. The table has the counts.",
        lambda frame: _drawing(samples, rows, frame),
    )


def _drawing(samples: Samples, rows: Sequence[Counted], frame: Frame) -> Drawing:
    edges, most = samples.edges, 5 if frame.is_narrow else 9
    scale = lying(
        lambda start, end: axis(edges[0], edges[-1], start, end, most=most, size=label_width),
        4.0,
        frame.width - 4,
        frame.width,
    )
    highest = max(max(each.counts) for each in rows) or 1
    bottom = ROW * len(rows) + 4
    more, height = more_in_table(len(samples.replicates) - len(rows), bottom + TICKS_BELOW + LINE)
    parts = [_row(each, scale, edges, highest, ROW * place, frame) for place, each in enumerate(rows)]
    under, name = lying_axis(scale, 0.0, bottom, samples.axis, frame)
    return Drawing(height, (under, *parts, name, *more))


def _row(each: Counted, scale: Scale, edges: Sequence[float], highest: int, top: float, frame: Frame) -> Svg:
    """The name and the median stand above the columns, which are one outline from the left to the right."""
    base, median = top + ROW - 2, scale(each.median)
    outline = [f"M{number(scale(edges[0]))},{number(base)}"]
    for count, edge in zip(each.counts, edges[1:], strict=True):
        outline.append(f"V{number(base - COLUMNS * count / highest)}H{number(scale(edge))}")
    beyond = f", {each.beyond} beyond" if each.beyond else ""
    said = shortened(f"median {short(each.median)} of {each.n}{beyond}", frame.width - 60)
    room = frame.width - text_width(said) - 10
    return group(
        "c-row",
        title(f"{each.label}: {said}"),
        element("path", d="".join([*outline, f"V{number(base)}"]), class_="c-columns c-s1"),
        line(scale.start, base, scale.end, base, "c-base"),
        line(median, base - COLUMNS - 3, median, base, "c-median"),
        text(0, top + 13, each.label, class_="c-label", width=max(20.0, room)),
        text(frame.width, top + 13, said, class_="c-rest", anchor="end"),
    )
