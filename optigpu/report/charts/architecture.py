"""A diagram of what was measured: the model, the layers of the stack, the figures, and the machine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill

from optigpu.documents.older import facts_of
from optigpu.documents.result import AttributionRow
from optigpu.report.canvas import COLOURS, FAINT, INK, sheet
from optigpu.report.charts.marks import Box, ChartData, Report
from optigpu.report.charts.metrics import figure_of, first_measured, primary_of
from optigpu.report.charts.quality import LOSSES, loss_of
from optigpu.report.leaderboard import workload_text
from optigpu.report.numbers import ratio, short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Document, SpecError

MODEL, LAYERS, FIGURES, MACHINE = range(4)
"""The levels, from the top."""


def architecture_data(report: Report) -> ChartData:
    """Of the best variant of a job, or of the first that was measured. Raises SpecError where none was."""
    measured = [each for each in report.results if primary_of(each)["value"] is not None]
    if not measured:
        raise SpecError(
            "No result was measured; run `optigpu ladder --model preset:gpt2 --stack int8_weight_only`."
        )
    best = report.attribution.best if report.attribution else None
    result = next((each for each in measured if each["variant"]["index"] == best), measured[0])
    variant = result["variant"]
    return ChartData(
        title=report.title,
        boxes=(
            Box(heading="Model", lines=(workload_text(variant["workload"], variant["model"]),), level=MODEL),
            *_layers(variant["stack"]),
            Box(heading="Measured", lines=tuple(_figures(result, measured, report)), level=FIGURES),
            Box(heading="Machine", lines=(result["environment"]["hardware_class"],), level=MACHINE),
        ),
        note=f"The stack: {variant['label']}.",
        origin=origin_line([result]),
    )


def _layers(stack: Sequence[Document]) -> Iterator[Box]:
    """A box for each layer that the stack uses; one that says so where it uses none."""
    names: dict[str, list[str]] = {}
    for technique in stack:
        kind = TECHNIQUES.get(technique["name"])
        names.setdefault(str(kind.layer) if kind else "another version's technique", []).append(
            technique["name"]
        )
    if not names:
        yield Box(heading="Stack", lines=("no technique: the baseline",), level=LAYERS)
    for layer, used in names.items():
        yield Box(heading=layer.capitalize(), lines=tuple(used), level=LAYERS)


def _figures(result: Document, measured: Sequence[Document], report: Report) -> Iterator[str]:
    """Speed, speedup, bytes and loss; what was not measured is named so."""
    variant = result["variant"]
    yield f"{with_interval(primary_of(result))} {heading(variant['primary_metric'])}"
    gain = _gain(variant["index"], report)
    yield f"{ratio(gain.speedup)} the baseline" if gain and gain.speedup else "speedup: not measured"
    yield _bytes(result, measured)
    name = first_measured([result], tuple(LOSSES))
    loss = loss_of(result, name) if name else None
    yield (
        f"{short(loss[0])}% {LOSSES[name].removesuffix(' (%)')}" if loss and name else "quality: not measured"
    )
    kernels = facts_of(result).get("attention_kernels")
    if kernels:
        yield f"attention by {', '.join(kernels)}"


def _gain(index: int, report: Report) -> AttributionRow | None:
    rows = report.attribution.rows if report.attribution else ()
    return next((row for row in rows if row.index == index), None)


def _bytes(result: Document, measured: Sequence[Document]) -> str:
    own = figure_of(result, "weight_bytes")
    baseline = next((each for each in measured if each["variant"]["role"] == "baseline"), None)
    whole = figure_of(baseline, "weight_bytes") if baseline else None
    if own is None:
        return "bytes of the weights: not measured"
    share = f", {own['value'] / whole['value']:.1%} of the baseline's" if whole else ""
    return f"{short(own['value'] / 1e6)} MB of weights{share}"


def _text(box: Box, width: int) -> str:
    return "\n".join(fill(line, width) for line in box.lines)


def paint_boxes(data: ChartData, path: Path) -> None:
    """Levels from the top, joined by arrows. Raises as `sheet` does."""
    from matplotlib.patches import FancyBboxPatch

    levels = [[box for box in data.boxes if box.level == level] for level in range(MACHINE + 1)]
    width = max(7.0, 2.6 * max(map(len, levels)))
    texts = {box: _text(box, 34 if len(levels[box.level]) > 1 else 80) for box in data.boxes}
    heights = [0.55 + 0.19 * max(texts[box].count("\n") + 1 for box in level) for level in levels]
    gap = 0.38
    whole = sum(heights) + gap * (len(levels) - 1)
    footer = "\n".join(filter(None, [data.note, data.origin]))
    with sheet(path, data.title, (width, whole + 1.2), (1, 1), footer) as (axes,):
        axes.set(xlim=(0, width), ylim=(0, whole))
        axes.set_axis_off()
        top = whole
        for number, (level, height) in enumerate(zip(levels, heights, strict=True)):
            each = (width - 0.3) / len(level)
            for place, box in enumerate(level):
                left = 0.15 + place * each
                corner, size = (left + 0.06, top - height), (each - 0.12, height)
                patch = FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.08")
                patch.set(facecolor="white", edgecolor=COLOURS[number], linewidth=2.0)
                patch.set_gid(f"box: {box.heading}")
                axes.add_patch(patch)
                middle = left + each / 2
                axes.text(middle, top - 0.2, box.heading, ha="center", va="center", weight="bold", color=INK)
                axes.text(middle, top - 0.38, texts[box], ha="center", va="top", fontsize=8.5, color=INK)
                if number + 1 < len(levels):
                    arrow = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.2}
                    axes.annotate("", (middle, top - height - gap), (middle, top - height), arrowprops=arrow)
            top -= height + gap
