"""The roofline: what each variant reaches, below the roofs that the machine measured."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optigpu.documents.older import facts_of
from optigpu.report.canvas import FAINT, INK, canvas, is_valid, legend, mark, name_of, note, sides, size_for
from optigpu.report.charts.metrics import primary_of
from optigpu.report.numbers import short
from optigpu.report.origin import origin_line
from optigpu.vocabulary import Document, SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    step, primary = _step(result), primary_of(result)
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
        text = f"{short(bandwidth / 1e9)} GB/s reading {array_size(array_bytes)}"
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


def array_size(array_bytes: int) -> str:
    return f"{array_bytes / 2**30:.3g} GiB" if array_bytes >= 2**30 else f"{array_bytes / 2**20:.3g} MiB"
