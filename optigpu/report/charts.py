"""Charts of a job's results as files: the ladder, the roofline, speed against quality and against latency.

Results are plain JSON, as everywhere in this package. matplotlib is imported when a chart is drawn.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optigpu.documents.older import facts_of
from optigpu.report.canvas import FAINT, INK, canvas, is_valid, legend, mark, name_of, note, sides, size_for
from optigpu.report.numbers import short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError, canonical_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL_PERCENT = 0.1
"""The quality loss that the project's founding goal allows, in percent."""
Chart = Callable[[str, Sequence[Document], Path], None]


def ladder_chart(title: str, results: Sequence[Document], path: Path) -> None:
    """The primary metric of each variant as a bar with its 95% interval, in the order of the plan.

    Raises SpecError when no result has a figure or `path` ends with another suffix than .svg, .png and .pdf.
    """
    shown = [result for result in results if _primary(result)["value"] is not None]
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
            "Grey: baseline. Light: one technique alone. Orange: the whole without one. Dark: all others. Lines: 95% "
            "intervals.",
        )


def _bar(axes: "Axes", place: int, result: Document) -> None:
    primary = _primary(result)
    colours = {"baseline": "#9aa5b1", "alone": "#56b4e9", "left_out": "#e69f00"}
    colour = colours.get(result["variant"]["role"], "#0072b2")
    style: dict[str, Any] = {"color": colour} if is_valid(result) else {"color": "white", "hatch": "////"}
    axes.barh(place, primary["value"], height=0.62, edgecolor=colour, **style)
    error = sides(primary)
    if error:
        axes.errorbar(primary["value"], place, xerr=error, color=INK, elinewidth=1.2, capsize=3)
    end = primary["ci"][1] if error else primary["value"]
    axes.annotate(with_interval(primary), (end, place), (6, 0), textcoords="offset points", va="center")


def roofline_chart(title: str, results: Sequence[Document], path: Path) -> None:
    """Each variant's operations per second over its operations per byte, below the roofs that the machine measured.

    A dotted line leads from a variant to what its roof allows. Raises SpecError when no result has a roofline or `path`
    ends with another suffix than .svg, .png and .pdf.
    """
    stepping = [result for result in results if _step(result) and _step(result)["measured_s"]]
    shown = [result for result in stepping if _step(result)["flops"]]
    if not shown:
        raise SpecError(
            "No result has a roofline to draw; facts.roofline.reason in the results says why there is none."
        )
    with canvas(path, title, *size_for(len(shown)), origin=origin_line(shown)) as axes:
        axes.set(xscale="log", yscale="log", ylabel="operations (GFLOP/s)")
        axes.set_xlabel("arithmetic intensity of a step (FLOP/byte)")
        _limits(axes, shown)
        for place, result in enumerate(shown):
            _under_roof(axes, place, result)
        axes.grid(which="major")
        legend(axes, len(shown))
        note(
            axes,
            "Roofs: measured on this machine. Dotted: what a variant's own roof allows. Bars: 95% intervals.",
        )
        _lay_out(axes)
        _roofs(axes, shown)


def _step(result: Document) -> Any:
    return (facts_of(result).get("roofline") or {}).get("step")


def _under_roof(axes: "Axes", place: int, result: Document) -> None:
    step, primary = _step(result), _primary(result)
    x, y = step["flops_per_byte"], step["flops"] / step["measured_s"] / 1e9
    roof = step["flops"] / step["attainable_s"] / 1e9
    label = f"{name_of(result)}\n  {step['attainable_s'] / step['measured_s']:.0%} of its roof; bound: {step['bound']}"
    axes.plot([x, x], [y, roof], linestyle=":", linewidth=1.0, color=FAINT, zorder=1)
    axes.errorbar(
        x, y, yerr=sides(primary, y / primary["value"]), label=label, **mark(place, is_valid(result))
    )


def _limits(axes: "Axes", shown: Sequence[Document]) -> None:
    """Limits that show every point and the knee of every roof, with a margin."""
    steps = [_step(result) for result in shown]
    xs = [step["flops_per_byte"] for step in steps]
    xs += [step["roof"]["flops_per_s"] / step["roof"]["bytes_per_s"] for step in steps]
    ys = [step["flops"] / step["measured_s"] / 1e9 for step in steps]
    ys += [step["roof"]["flops_per_s"] / 1e9 for step in steps]
    axes.set_xlim(min(xs) / 4, max(xs) * 8)
    axes.set_ylim(min(ys) / 4, max(ys) * 3)


def _lay_out(axes: "Axes") -> None:
    """Fixes the layout, so that the texts along the roofs can be turned to the drawn slopes."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _roofs(axes: "Axes", shown: Sequence[Document]) -> None:
    """A slope for each bandwidth, and a ceiling for each dtype that a variant uses."""
    roofs = [_step(result)["roof"] for result in shown]
    bandwidths = {roof["bytes_per_s"]: roof["array_bytes"] for roof in roofs}
    rates: dict[float, set[str]] = {}
    for result, roof in zip(shown, roofs, strict=True):
        rates.setdefault(roof["flops_per_s"], set()).add(facts_of(result)["roofline"]["dtype"])
    left, right = axes.get_xlim()
    top = max(rates) / 1e9
    line: dict[str, Any] = {"color": INK, "linewidth": 1.3, "zorder": 1}
    for place, (bandwidth, array_bytes) in enumerate(sorted(bandwidths.items())):
        knee = top * 1e9 / bandwidth
        axes.plot([left, knee], [left * bandwidth / 1e9, top], **line)
        text = f"{short(bandwidth / 1e9)} GB/s reading {_size(array_bytes)}"
        _along(axes, bandwidth / 1e9, left * (1.3 if place % 2 else 1.9), text)
    for rate, dtypes in rates.items():
        axes.plot([rate / max(bandwidths), right], [rate / 1e9] * 2, **line)
        text = f"{', '.join(sorted(dtypes))}: {short(rate / 1e9)} GFLOP/s"
        axes.annotate(text, (right, rate / 1e9), (0, 4), textcoords="offset points", ha="right")


def _along(axes: "Axes", slope: float, x: float, text: str) -> None:
    """Text on a slope y = slope x, turned as the slope appears on the page."""
    box = axes.get_window_extent()
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    rise = box.height / math.log10(top / bottom)
    run = box.width / math.log10(right / left)
    y = max(slope * x, bottom * 1.15)
    axes.annotate(
        text,
        (y / slope, y),
        (-2, 4),
        textcoords="offset points",
        rotation=math.degrees(math.atan2(rise, run)),
        rotation_mode="anchor",
    )


def _size(array_bytes: int) -> str:
    return f"{array_bytes / 2**30:.3g} GiB" if array_bytes >= 2**30 else f"{array_bytes / 2**20:.3g} MiB"


def quality_chart(title: str, results: Sequence[Document], path: Path) -> None:
    """Speed over quality loss, with the founding goal of 0.1% marked.

    The loss is that of accuracy where it was measured, else the share of positions whose most likely token is another
    one than fp32's. Raises SpecError when no result has either or `path` ends with another suffix than .svg, .png and
    .pdf.
    """
    timed = [result for result in results if _primary(result)["value"] is not None]
    name = next((name for name in _LOSSES if any(_loss(result, name) for result in timed)), None)
    if name is None:
        raise SpecError(
            "No result has a quality to draw; measure a trained model, such as bundled:tiny, with the meter 'quality'."
        )
    shown = [result for result in timed if _loss(result, name)]
    others = [result["variant"]["label"] for result in results if result not in shown]
    with canvas(path, title, *size_for(len(shown)), origin=origin_line(shown)) as axes:
        for place, result in enumerate(shown):
            _at_loss(axes, place, result, name)
        _loss_axis(axes, _LOSSES[name])
        axes.set_ylim(bottom=0)
        axes.margins(y=0.12)
        axes.set_ylabel(heading(shown[0]["variant"]["primary_metric"]))
        axes.grid(which="major")
        legend(axes, len(shown))
        without = f" Not shown, without that figure: {', '.join(others)}." if others else ""
        note(axes, f"Bars: 95% intervals.{without}")


_LOSSES = {
    "accuracy_loss_percent": "accuracy lost against fp32 (%)",
    "top1_agreement": "positions whose most likely token is not fp32's (%)",
}
"""The metrics of quality loss, the preferred one first, with the label of the axis."""


def _loss(result: Document, name: str) -> tuple[float, list[list[float]] | None] | None:
    """Loss in percent with the sides of its interval; None if it was not measured."""
    metric = result["metrics"].get(name)
    if not metric or metric["value"] is None:
        return None
    error = sides(metric)
    if name == "accuracy_loss_percent":
        return metric["value"], error
    flipped = [[100 * error[1][0]], [100 * error[0][0]]] if error else None
    return 100 * (1 - metric["value"]), flipped


def _at_loss(axes: "Axes", place: int, result: Document, name: str) -> None:
    primary, found = _primary(result), _loss(result, name)
    assert found is not None
    loss, error = found
    label = f"{name_of(result)}\n  {short(loss)}% lost, {with_interval(primary)}"
    axes.errorbar(
        loss, primary["value"], xerr=error, yerr=sides(primary), label=label, **mark(place, is_valid(result))
    )


def _loss_axis(axes: "Axes", text: str) -> None:
    """Linear up to the goal and logarithmic beyond, so that no loss and large losses are both readable."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("symlog", linthresh=GOAL_PERCENT, linscale=0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.02), max(high, 2.0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(GOAL_PERCENT, color="#c1121f", linewidth=1.2, linestyle="--", zorder=1)
    axes.annotate(
        f"founding goal: at most {GOAL_PERCENT:g}% lost",
        (GOAL_PERCENT, 1.0),
        (4, -4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        color="#c1121f",
        va="top",
    )
    axes.set_xlabel(text)


def throughput_chart(title: str, results: Sequence[Document], path: Path) -> None:
    """The primary metric over the latency of a request, with a line through the variants of one stack.

    Raises SpecError when no result has a latency or `path` ends with another suffix than .svg, .png and .pdf.
    """
    shown = [result for result in results if _primary(result)["value"] is not None and _latency(result)]
    if not shown:
        raise SpecError(
            "No result has a latency to draw; measure a workload that has one, such as batch_sweep."
        )
    lines: dict[str, list[tuple[float, float]]] = {}
    with canvas(path, title, *size_for(len(shown)), origin=origin_line(shown)) as axes:
        for place, result in enumerate(shown):
            latency, primary = _latency(result), _primary(result)
            x, y = latency["value"] * 1e3, primary["value"]
            lines.setdefault(canonical_json(result["variant"]["stack"]), []).append((x, y))
            label = f"{name_of(result)}\n  {with_interval(primary)}, {short(x)} ms"
            xerr, yerr = sides(latency, 1e3), sides(primary)
            axes.errorbar(x, y, xerr=xerr, yerr=yerr, label=label, **mark(place, is_valid(result)))
        for points in lines.values():
            axes.plot(*zip(*sorted(points), strict=True), linewidth=1.0, color=FAINT, zorder=1)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="latency of a request (ms)", ylabel=heading(shown[0]["variant"]["primary_metric"]))
        axes.grid(which="major")
        legend(axes, len(shown))
        note(axes, "Up and to the left is better. Lines join what has the same stack. Bars: 95% intervals.")


def _latency(result: Document) -> Document:
    """The summary of a request's latency; empty where there is no value."""
    metric: Document = result["metrics"].get("latency_s") or {"value": None}
    return {} if metric["value"] is None else metric


def _primary(result: Document) -> Document:
    metric: Document = result["metrics"][result["variant"]["primary_metric"]]
    return metric


CHARTS: dict[str, Chart] = {
    "ladder": ladder_chart,
    "roofline": roofline_chart,
    "quality": quality_chart,
    "throughput": throughput_chart,
}
"""The charts by name."""
