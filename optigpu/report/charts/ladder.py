"""The ladder: the primary metric of each variant, in the order of the plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optigpu.report.canvas import INK, bar_look, canvas, is_valid, name_of, note, sides
from optigpu.report.charts.metrics import primary_of
from optigpu.report.numbers import with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ladder_chart(title: str, results: Sequence[Document], path: Path) -> None:
    """The primary metric of each variant as a bar with its 95% interval, in the order of the plan.

    Raises SpecError when no result has a figure or `path` ends with another suffix than .svg, .png and .pdf.
    """
    shown = [result for result in results if primary_of(result)["value"] is not None]
    if not shown:
        raise SpecError("No result has a value to draw; `optigpu run --format json` prints the reasons.")
    with canvas(path, title, 8.0, 1.4 + 0.5 * len(shown), origin=origin_line(shown)) as axes:
        for place, result in enumerate(shown):
            _bar(axes, place, result)
        axes.set_yticks(range(len(shown)), [name_of(result) for result in shown])
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.set_xlim(left=0)
        axes.set_xlabel(heading(shown[0]["variant"]["primary_metric"]))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        note(
            axes,
            "Grey, crossed: the baseline. Light, with a grid: one technique alone. Orange: the whole without one. "
            "Dark: all others. Striped: not valid. Lines: 95% intervals.",
        )


_SERIES = {"alone": 4, "left_out": 5, "baseline": 7}
"""The look of a role's bars; that of all others is the first."""


def _bar(axes: "Axes", place: int, result: Document) -> None:
    primary = primary_of(result)
    number = _SERIES.get(result["variant"]["role"], 0)
    axes.barh(place, primary["value"], height=0.62, **bar_look(number, valid=is_valid(result)))
    error = sides(primary)
    if error:
        axes.errorbar(primary["value"], place, xerr=error, color=INK, elinewidth=1.2, capsize=3)
    end = primary["ci"][1] if error else primary["value"]
    axes.annotate(with_interval(primary), (end, place), (6, 0), textcoords="offset points", va="center")
