"""The data of a chart as a table, for who does not see the chart or wants its figures."""

from collections.abc import Callable
from itertools import pairwise

from optigpu.documents.views import History, LevelChange
from optigpu.report.charts.marks import Interval, Mark, Panel, Samples
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import short
from optigpu.report.rows import heading

MOST_VERSIONS = 3
"""Packages that a change names."""


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


def history_table(history: History) -> Grid:
    """A row for each result, the newest first; a change of the level is written beside the first result after it."""
    changes = {each.result_id: change_text(each) for each in history.changes}
    columns = (
        Column("measured (UTC)"),
        Column(heading(history.metric), right=True),
        Column("95% interval", right=True),
        Column("change"),
        Column("warnings"),
    )
    rows = (
        (
            f"{each.measured_at:%Y-%m-%d %H:%M}",
            short(each.value),
            interval(each.ci),
            changes.get(each.result_id, ""),
            ", ".join(each.warnings),
        )
        for each in reversed(history.points)
    )
    return Grid(history_title(history), columns, tuple(rows)).without_empty_columns()


def history_title(history: History) -> str:
    return f"{history.label} on {history.hardware}"


def change_text(change: LevelChange) -> str:
    """`12.1% higher (worse): torch 2.12 → 2.13`."""
    size = f"{abs(change.ratio - 1):.1%} {'higher' if change.ratio > 1 else 'lower'}"
    named = [f"{name} {old or 'none'} → {new or 'none'}" for name, (old, new) in change.versions.items()]
    more = len(named) - MOST_VERSIONS
    what = ", ".join(named[:MOST_VERSIONS] + ([f"{more} more versions"] if more > 0 else []))
    return f"{size} ({'better' if change.improved else 'worse'}): {what or 'no version changed'}"


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


def reasons(missing: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{label}: {reason}" for label, reason in missing.items())
