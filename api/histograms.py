"""How the samples of each replicate are spread: counted in bins, drawn as a histogram in rows alike, and as a table."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

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
from optigpu.report.charts.svg.plane import LINE, TICKS_BELOW, Scale, axis, drawable, label_width, lying
from optigpu.report.formats import Column, Grid, short
from optigpu.vocabulary import Frozen, SpecError

LEAST_BINS, MOST_BINS = 8, 40
BEYOND = 0.01
"""The share of the samples that may lie beyond the last bin, where they would make all bins wide."""
LEAST_SPAN = 1e-9
"""Samples that differ by less, relative to their size, are one."""
FAR = 2.0
"""They do where they are so many times as far from the median as the others reach."""


class Counted(Frozen):
    """The samples of one replicate: how many lie in each bin, and how many beyond the last."""

    label: str
    counts: tuple[int, ...]
    beyond: int
    n: int
    median: float


class Samples(Frozen):
    """`edges` bound the bins of all replicates, one more than there are bins; `axis` names what is counted."""

    title: str
    axis: str
    edges: tuple[float, ...]
    replicates: tuple[Counted, ...]


def samples_data(title: str, axis: str, samples: Sequence[Sequence[float]], scale: float = 1.0) -> Samples:
    """Of each replicate. Raises SpecError where there is no finite sample."""
    scaled = [[value * scale for value in each if math.isfinite(value * scale)] for each in samples]
    pooled = sorted(value for each in scaled for value in each)
    if not pooled:
        raise SpecError(f"{title}: there is no sample to count; measure again and keep the samples.")
    # As many bins as Freedman and Diaconis take (1981), from the least sample on; few far ones are beyond.
    low = pooled[0]
    kept = pooled[math.ceil((1 - BEYOND) * len(pooled)) - 1]
    quarter, half, three_quarters = (pooled[int(share * (len(pooled) - 1))] for share in (0.25, 0.5, 0.75))
    width = 2 * (three_quarters - quarter) / len(pooled) ** (1 / 3)
    high = next(value for value in reversed(pooled) if value <= kept or value - half <= FAR * (kept - low))
    span = high - low
    if span <= LEAST_SPAN * max(abs(high), abs(low), LEAST_SPAN):
        span = abs(high) * 0.01 or 1.0
    bins = max(LEAST_BINS, math.ceil(min(MOST_BINS, span / width))) if width > 0 else LEAST_BINS
    edges = [*(low + span * number / bins for number in range(bins)), max(high, low + span)]
    replicates = (_counted(f"replicate {n}", each, edges) for n, each in enumerate(scaled, 1) if each)
    return Samples(title=title, axis=axis, edges=tuple(edges), replicates=tuple(replicates))


def _counted(label: str, samples: Sequence[float], edges: Sequence[float]) -> Counted:
    low, width, bins = edges[0], (edges[-1] - edges[0]) / (len(edges) - 1), len(edges) - 1
    counts = [0] * bins
    beyond = 0
    for value in samples:
        if value > edges[-1]:
            beyond += 1
        else:
            counts[min(bins - 1, int((value - low) / width))] += 1
    return Counted(label=label, counts=tuple(counts), beyond=beyond, n=len(samples), median=median(samples))


MOST_REPLICATES = 12
ROW, COLUMNS = 66.0, 42.0
"""The height of a row, and of the highest column in it."""


def histogram(samples: Samples) -> Sketch | str:
    """A row for each replicate; the columns of all rows have one scale."""
    rows = samples.replicates[:MOST_REPLICATES]
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


def samples_table(samples: Samples) -> Grid:
    """A row for each bin: how many samples of each replicate lie in it."""
    columns = (
        Column(samples.axis),
        *(Column(f"{each.label}, median {short(each.median)}", right=True) for each in samples.replicates),
    )
    bins = tuple(
        (f"{short(low)} to {short(high)}", *(str(each.counts[place]) for each in samples.replicates))
        for place, (low, high) in enumerate(pairwise(samples.edges))
    )
    beyond = (f"above {short(samples.edges[-1])}", *(str(each.beyond) for each in samples.replicates))
    return Grid(samples.title, columns, (*bins, beyond))
