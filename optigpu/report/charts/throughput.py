"""Throughput over the latency of a request."""

from collections.abc import Sequence
from pathlib import Path

from optigpu.report.canvas import FAINT, canvas, is_valid, legend, mark, name_of, note, sides, size_for
from optigpu.report.charts.metrics import primary_of
from optigpu.report.numbers import short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError, canonical_json


def throughput_chart(title: str, results: Sequence[Document], path: Path) -> None:
    """The primary metric over the latency of a request, with a line through the variants of one stack.

    Raises SpecError when no result has a latency or `path` ends with another suffix than .svg, .png and .pdf.
    """
    shown = [result for result in results if primary_of(result)["value"] is not None and _latency(result)]
    if not shown:
        raise SpecError(
            "No result has a latency to draw; measure a workload that has one, such as batch_sweep."
        )
    lines: dict[str, list[tuple[float, float]]] = {}
    with canvas(path, title, *size_for(len(shown)), origin=origin_line(shown)) as axes:
        for place, result in enumerate(shown):
            latency, primary = _latency(result), primary_of(result)
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
