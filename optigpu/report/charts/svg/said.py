"""What is said of a chart in words: its description, and the sentence in its place where it has nothing to show."""

from collections.abc import Sequence

from optigpu.report.charts.marks import Mark, Panel
from optigpu.report.charts.svg.words import shortened
from optigpu.report.numbers import short

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
