"""Draws panels of marks: bars, lines, points over the loss of quality, and points with their front."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from optigpu.report.canvas import FAINT, INK, LINES, bar_look, mark, sheet
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel
from optigpu.report.charts.quality import loss_axis
from optigpu.vocabulary import Better

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_WIDTH = 30
"""Characters of a line of a label."""
LINEAR_BELOW = 1e-5
"""Where an axis that begins at 0 becomes logarithmic: what is less is as good as nothing."""


def paint(data: ChartData, path: Path) -> None:
    """Draws the panels two in a row. Raises as `sheet` does."""
    columns = min(2, len(data.panels))
    rows = -(-len(data.panels) // columns)
    height = sum(max(map(_height, data.panels[row * columns :][:columns])) for row in range(rows))
    footer = "\n".join(filter(None, [data.note, data.origin]))
    with sheet(path, data.title, (6.8 * columns, height + 0.9), (rows, columns), footer) as grid:
        for axes, panel in zip(grid, data.panels, strict=False):
            axes.set_title(panel.title, fontsize=9.5)
            axes.set_gid(f"panel: {panel.title}")
            if panel.marks:
                _PAINTERS[panel.form](axes, panel)
            else:
                _say_nothing(axes, panel)
        for axes in grid[len(data.panels) :]:
            axes.set_axis_off()


def _height(panel: Panel) -> float:
    """Inches that a panel needs."""
    if panel.form is Form.FRONT:
        return max(3.6, 0.8 + 0.18 * len(panel.marks))
    if panel.form is not Form.BARS:
        return 3.6
    lines = sum(fill(label, LABEL_WIDTH).count("\n") + 1 for label in _labels(panel))
    return max(2.2, 1.1 + 0.22 * lines + 0.2 * len(panel.marks))


def _labels(panel: Panel) -> list[str]:
    return list(dict.fromkeys(each.label for each in panel.marks))


def _series(panel: Panel) -> list[str]:
    return list(dict.fromkeys(each.series for each in panel.marks))


def _bars(axes: "Axes", panel: Panel) -> None:
    """Horizontal bars, those of one label together; what stands beside a bar is its figure."""
    labels, series = _labels(panel), _series(panel)
    grouped = len(panel.marks) > len(labels)
    height = 0.74 / len(series) if grouped else 0.62
    for each in panel.marks:
        number = series.index(each.series)
        shift = (number - (len(series) - 1) / 2) * height if grouped else 0.0
        _bar(axes, labels.index(each.label) + shift, height, number, each)
    axes.set_yticks(range(len(labels)), [fill(label, LABEL_WIDTH) for label in labels])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    if all(each.value >= 0 for each in panel.marks):
        axes.set_xlim(left=0)
    axes.set_xlabel(panel.axis)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    if grouped:
        _name_series(axes, series)


def _name_series(axes: "Axes", series: Sequence[str]) -> None:
    """A legend of what valid bars look like."""
    from matplotlib.patches import Patch

    handles = [Patch(label=name, **bar_look(number)) for number, name in enumerate(series)]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="lower right")


def _bar(axes: "Axes", place: float, height: float, number: int, each: Mark) -> None:
    look = bar_look(number, valid=each.valid, claimed=each.claimed)
    (drawn,) = axes.barh(
        place,
        each.value - each.start,
        left=each.start,
        height=height,
        **look,
    )
    drawn.set_gid(f"mark: {each.label} {each.series}".strip())
    end = max(each.value, each.start)
    if each.ci:
        below, above = each.value - each.ci[0], each.ci[1] - each.value
        axes.errorbar(
            each.value, place, xerr=[[max(0, below)], [max(0, above)]], color=INK, elinewidth=1.2, capsize=3
        )
        end = max(end, each.ci[1])
    axes.annotate(each.text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8)


def _lines(axes: "Axes", panel: Panel) -> None:
    """Points of a series, joined in the order of x; each series has a colour, a marker and a kind of line."""
    _points(axes, panel, join=True)
    if panel.logarithmic:
        axes.set(xscale="log", yscale="log")
        ticks = sorted({each.x for each in panel.marks if each.x})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    else:
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.margins(x=0.15, y=0.12)
    axes.set(xlabel=panel.x_axis, ylabel=panel.axis)


def _loss(axes: "Axes", panel: Panel) -> None:
    """Points over the loss of quality, with the founding goal."""
    _points(axes, panel, join=False)
    loss_axis(axes, panel.x_axis)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.2)
    axes.set_ylabel(panel.axis)


def _front(axes: "Axes", panel: Panel) -> None:
    """A point for each mark, named beside the axes, and a line through those that no other surpasses."""
    below = panel.better is panel.x_better is Better.LOWER  # where nothing else stands
    for number, each in enumerate(panel.marks):
        _point(axes, number, each, each.label, below=below)
    front = sorted((each for each in panel.marks if each.on_front), key=lambda each: each.x or 0.0)
    axes.plot(
        [each.x or 0.0 for each in front],
        [each.value for each in front],
        linestyle="--",
        color=FAINT,
        linewidth=1.2,
        zorder=1,
    )
    if panel.logarithmic:
        axes.set_xscale("symlog", linthresh=LINEAR_BELOW, linscale=0.3)
    else:
        axes.set_xlim(left=0)
    if panel.logarithmic_values:
        _logarithmic_values(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.15, y=0.12)
    axes.set(xlabel=panel.x_axis, ylabel=panel.axis)
    axes.grid(which="major")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _logarithmic_values(axes: "Axes") -> None:
    """With numbers as people write them, at 1, 2, 3 and 5 of each power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _points(axes: "Axes", panel: Panel, *, join: bool) -> None:
    for number, name in enumerate(_series(panel)):
        own = sorted((each for each in panel.marks if each.series == name), key=lambda each: each.x or 0.0)
        for place, each in enumerate(own):
            _point(axes, number, each, name if place == 0 else None)
        if join:
            line = LINES[number % len(LINES)]
            axes.plot(
                [each.x or 0.0 for each in own],
                [each.value for each in own],
                linestyle=line,
                color=mark(number, True)["color"],
                linewidth=1.4,
                zorder=1,
            )
    axes.grid(which="major")
    if any(_series(panel)):
        axes.legend(frameon=False, fontsize=8, loc="best")


def _point(axes: "Axes", number: int, each: Mark, name: str | None, *, below: bool = False) -> None:
    """Its text stands above it on the right, or below it on the left."""
    x = each.x or 0.0
    sides = [
        [[max(0.0, value - ci[0])], [max(0.0, ci[1] - value)]] if ci else None
        for value, ci in ((x, each.x_ci), (each.value, each.ci))
    ]
    label = fill(name, LABEL_WIDTH) if name else None
    drawn = axes.errorbar(
        x, each.value, xerr=sides[0], yerr=sides[1], label=label, **mark(number, each.valid)
    )
    drawn.lines[0].set_gid(f"mark: {each.label} {each.series}".strip())
    place, side = ((-5, -4), ("right", "top")) if below else ((6, 5), ("left", "baseline"))
    axes.annotate(
        each.text, (x, each.value), place, textcoords="offset points", fontsize=8, ha=side[0], va=side[1]
    )


def _say_nothing(axes: "Axes", panel: Panel) -> None:
    """Why a panel is empty, in its place."""
    reasons = dict.fromkeys(panel.missing.values())
    axes.set_axis_off()
    axes.annotate(
        fill(f"Not measured: {' '.join(reasons)}", 60),
        (0.02, 0.9),
        xycoords="axes fraction",
        va="top",
        color=FAINT,
    )


_PAINTERS: dict[Form, Callable[["Axes", Panel], None]] = {
    Form.BARS: _bars,
    Form.LINES: _lines,
    Form.LOSS: _loss,
    Form.FRONT: _front,
}
