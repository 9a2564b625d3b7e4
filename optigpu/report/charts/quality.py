"""Speed over quality loss, with the founding goal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optigpu.report.canvas import RED, canvas, is_valid, legend, mark, name_of, note, sides, size_for
from optigpu.report.charts.metrics import primary_of
from optigpu.report.numbers import short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL_PERCENT = 0.1
"""The quality loss that the project's founding goal allows, in percent."""


def quality_chart(title: str, results: Sequence[Document], path: Path) -> None:
    """Speed over quality loss, with the founding goal of 0.1% marked.

    The loss is that of accuracy where it was measured, else the share of positions whose most likely token is another
    one than fp32's. Raises SpecError when no result has either or `path` ends with another suffix than .svg, .png and
    .pdf.
    """
    timed = [result for result in results if primary_of(result)["value"] is not None]
    name = next((name for name in LOSSES if any(loss_of(result, name) for result in timed)), None)
    if name is None:
        raise SpecError(
            "No result has a quality to draw; measure a trained model, such as bundled:tiny, with the meter 'quality'."
        )
    shown = [result for result in timed if loss_of(result, name)]
    others = [result["variant"]["label"] for result in results if result not in shown]
    with canvas(path, title, *size_for(len(shown)), origin=origin_line(shown)) as axes:
        for place, result in enumerate(shown):
            _at_loss(axes, place, result, name)
        loss_axis(axes, LOSSES[name])
        axes.set_ylim(bottom=0)
        axes.margins(y=0.12)
        axes.set_ylabel(heading(shown[0]["variant"]["primary_metric"]))
        axes.grid(which="major")
        legend(axes, len(shown))
        without = f" Not shown, without that figure: {', '.join(others)}." if others else ""
        note(axes, f"Bars: 95% intervals.{without}")


LOSSES = {
    "accuracy_loss_percent": "accuracy lost against fp32 (%)",
    "top1_agreement": "positions whose most likely token is not fp32's (%)",
}
"""The metrics of quality loss, the preferred one first, with the label of the axis."""


def loss_of(result: Document, name: str) -> tuple[float, list[list[float]] | None] | None:
    """Loss in percent with the sides of its interval; None if it was not measured."""
    metric = result["metrics"].get(name)
    if not metric or metric["value"] is None:
        return None
    error = sides(metric)
    if name == "accuracy_loss_percent":
        return metric["value"], error
    flipped = [[100 * error[1][0]], [100 * error[0][0]]] if error else None
    return 100 * (1 - metric["value"]), flipped


def loss_interval(result: Document, name: str) -> tuple[float, tuple[float, float] | None] | None:
    """Loss in percent with its interval; None if it was not measured."""
    found = loss_of(result, name)
    if found is None:
        return None
    loss, error = found
    return loss, (loss - error[0][0], loss + error[1][0]) if error else None


def _at_loss(axes: "Axes", place: int, result: Document, name: str) -> None:
    primary, found = primary_of(result), loss_of(result, name)
    assert found is not None
    loss, error = found
    label = f"{name_of(result)}\n  {short(loss)}% lost, {with_interval(primary)}"
    axes.errorbar(
        loss, primary["value"], xerr=error, yerr=sides(primary), label=label, **mark(place, is_valid(result))
    )


def loss_axis(axes: "Axes", text: str) -> None:
    """Linear up to the goal and logarithmic beyond, so that no loss and large losses are both readable."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("symlog", linthresh=GOAL_PERCENT, linscale=0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.02), max(high, 2.0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(GOAL_PERCENT, color=RED, linewidth=1.2, linestyle="--", zorder=1)
    axes.annotate(
        f"founding goal: at most {GOAL_PERCENT:g}% lost",
        (GOAL_PERCENT, 1.0),
        (4, -4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        color=RED,
        va="top",
    )
    axes.set_xlabel(text)
