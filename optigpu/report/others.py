"""What other tools measured, as a table."""

from collections import defaultdict
from collections.abc import Iterator

from optigpu.documents.others import OthersFigure, OthersFile
from optigpu.report.formats import Grid, columns, short
from optigpu.report.rows import heading


def others_grid(file: OthersFile, *, left_out: bool = False) -> Grid:
    """A line for each figure that was taken; with `left_out` the notes say which were not, and why."""
    notes = ["Measured by others: not ranked, and not repeated here."]
    notes += [f"{figure.metric} by {figure.named}: {figure.differs}." for figure in _differing(file)]
    return Grid(
        title=file.title[0].upper() + file.title[1:],
        columns=columns("load or test", "figure", "of", "value:", "in the file"),
        rows=tuple(
            (row.label, heading(figure.metric), figure.statistic, short(figure.value), figure.named)
            for row in file.rows
            for figure in row.figures
        ),
        notes=(*notes, *(_left_out(file) if left_out else ())),
    )


def _differing(file: OthersFile) -> list[OthersFigure]:
    """The first figure of each metric whose definition is not ours."""
    figures = [figure for row in file.rows for figure in row.figures if figure.differs]
    return list({(each.metric, each.differs): each for each in reversed(figures)}.values())[::-1]


def _left_out(file: OthersFile) -> Iterator[str]:
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for each in file.left_out:
        reasons[each.why].append(each.named)
    for why, names in reasons.items():
        yield f"Left out, {why}: {', '.join(names)}."
