"""The data of a chart as a table, for who does not see the chart or wants its figures."""

from collections.abc import Callable
from itertools import pairwise

from optigpu.report.charts.history import Samples, Timeline
from optigpu.report.charts.ladders import Step, Steps
from optigpu.report.charts.marks import Interval, Mark, Panel
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import ratio, short

Cells = tuple[Column, Callable[[Mark], str]]


def panel_table(panel: Panel) -> Grid:
    """A row for each mark, and a note for each label that has none. Columns that are empty are left out."""
    columns: list[Cells] = [
        (Column("rank", right=True), lambda each: "" if each.rank is None else str(each.rank)),
        (Column("name"), lambda each: each.label),
        (Column("series"), lambda each: each.series if each.series != each.label else ""),
        (Column("point"), lambda each: each.text if panel.x_axis and each.text != each.label else ""),
        (Column("from", right=True), lambda each: short(each.start) if each.start else ""),
        (Column(panel.axis, right=True), lambda each: short(each.value)),
        (Column("95% interval", right=True), lambda each: interval(each.ci)),
        (Column("its roof", right=True), lambda each: "" if each.limit is None else short(each.limit)),
    ]
    if panel.x_axis:
        columns += [
            (Column(panel.x_axis, right=True), lambda each: short(each.x)),
            (Column("its 95% interval", right=True), lambda each: interval(each.x_ci)),
        ]
    columns += [
        (Column("on the front"), lambda each: "yes" if each.on_front else ""),
        (Column("status"), _status),
    ]
    notes = (*(f"{each.text}." for each in panel.roofs), *reasons(panel.missing))
    rows = tuple(tuple(cell(each) for _, cell in columns) for each in panel.marks)
    faint = frozenset(number for number, each in enumerate(panel.marks) if not each.valid)
    return Grid(
        panel.title, tuple(column for column, _ in columns), rows, notes, faint
    ).without_empty_columns()


def steps_table(steps: Steps) -> Grid:
    """A row for each rung: its speedup, and what its technique buys added, alone and left out."""
    names = ("speedup", "added", "alone", "left out")
    columns = (Column("rung"), *(Column(name, right=True) for name in names))
    rows = tuple(_step(each) for each in steps.steps)
    faint = frozenset(number for number, each in enumerate(steps.steps) if not each.speedup.valid)
    return Grid(steps.title, columns, rows, reasons(steps.missing), faint).without_empty_columns()


def _step(each: Step) -> tuple[str, ...]:
    effects = (each.added, each.alone, each.left_out)
    return (each.label, ratio(each.speedup), *("" if gain is None else ratio(gain) for gain in effects))


def timeline_table(timeline: Timeline) -> Grid:
    """A row for each result, the newest first; a change of the level is written beside the first result after it."""
    changes = {each.source: each.text for each in timeline.changes}
    columns = (
        Column("measured (UTC)"),
        Column(timeline.axis, right=True),
        Column("95% interval", right=True),
        Column("change"),
        Column("warnings"),
    )
    rows = tuple(
        (
            f"{each.at:%Y-%m-%d %H:%M}",
            short(each.value),
            interval(each.ci),
            changes.get(each.source, ""),
            ", ".join(each.warnings),
        )
        for each in reversed(timeline.moments)
    )
    return Grid(timeline.title, columns, rows).without_empty_columns()


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


def interval(ci: Interval | None) -> str:
    return "" if ci is None else f"[{short(ci[0])}, {short(ci[1])}]"


def _status(each: Mark) -> str:
    return "claimed" if each.claimed else "" if each.valid else "not valid"


def reasons(missing: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{label}: {reason}" for label, reason in missing.items())
