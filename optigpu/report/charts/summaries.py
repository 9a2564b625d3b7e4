"""A report as a table, as a diagram of what was measured, and beside what is claimed for an RTX 5090."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from optigpu.claims import Book, Claim, Measured, baselines, beside, from_results
from optigpu.claims.model import UNITS
from optigpu.documents.older import facts_of
from optigpu.report.charts.marks import (
    LOSSES,
    Box,
    ChartData,
    Form,
    Mark,
    Panel,
    Report,
    Table,
    figure_of,
    first_measured,
    label_of,
    loss_of,
    of_panels,
    primary_of,
)
from optigpu.report.leaderboard import workload_text
from optigpu.report.numbers import MISSING, ratio, scaled, short, with_interval
from optigpu.report.rows import heading, origin_line
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import METRICS, Better, Document, Role, SpecError

FIGURES: tuple[tuple[str, str, float], ...] = (
    ("latency (ms)", "latency_s", 1e3),
    ("training step (ms)", "step_s", 1e3),
    ("peak memory (MB)", "peak_bytes", 1e-6),
    ("weights (MB)", "weight_bytes", 1e-6),
    ("memory bandwidth used (%)", "mbu", 100.0),
    ("matrix rate used (%)", "mfu", 100.0),
    ("energy (J)", "energy_j", 1.0),
)
"""Heading, metric and scale of a row; a row without any figure is left out."""
MOST_COLUMNS = 8
"""Variants of a legible picture; the table of `optigpu show` has all."""


def comparison_data(report: Report) -> ChartData:
    """The first variants of the plan. Raises SpecError where none has its primary figure."""
    measured = report.measured
    if not measured:
        raise SpecError(
            "No result has a figure for a table; run `optigpu ladder --model preset:gpt2 --stack int8_weight_only`."
        )
    shown, left = measured[:MOST_COLUMNS], measured[MOST_COLUMNS:]
    more = f" Left out: {', '.join(map(label_of, left))}." if left else ""
    return ChartData(
        title=report.title,
        table=Table(headings=("", *map(label_of, shown)), rows=tuple(_rows(shown, report))),
        note=f'"{MISSING}" was not measured; `optigpu show` prints the reasons. ± and [ ] are 95% intervals.{more}',
        origin=origin_line(shown),
    )


def _rows(shown: Sequence[Document], report: Report) -> Iterator[tuple[str, ...]]:
    """The rows that have a figure."""
    gains = {row.index: row.speedup for row in report.rows}
    lost = first_measured(shown, LOSSES)

    def speedup(result: Document) -> str:
        variant = result["variant"]
        return "1" if variant["role"] == Role.BASELINE else ratio(gains.get(variant["index"]))

    def loss(result: Document) -> str:
        found = loss_of(result, lost)
        return short(found[0]) if found else MISSING

    def figure(metric: str, scale: float) -> Callable[[Document], str]:
        return lambda result: scaled(figure_of(result, metric), scale)

    cells: dict[str, Callable[[Document], str]] = {
        heading(shown[0]["variant"]["primary_metric"]): lambda result: with_interval(primary_of(result)),
        "speedup": speedup,
        **{name: figure(metric, scale) for name, metric, scale in FIGURES},
        "quality lost (%)": loss,
    }
    for name, cell in cells.items():
        row = tuple(map(cell, shown))
        if set(row) != {MISSING}:
            yield name, *row


CARD = "NVIDIA GeForce RTX 5090"


def baselines_data(report: Report) -> ChartData:
    """Raises SpecError where no valid result is of the work of one of the baselines."""
    measured = from_results(report.results)
    found = [(claim, figures) for claim in claims(baselines()) if (figures := beside(claim, measured))]
    if not found:
        raise SpecError(
            f"No valid result is of the work that is claimed for an {CARD}; run `optigpu run --workload matmul "
            "--sizes 4096`, or `optigpu ladder --model preset:gpt2 --stack int8_weight_only`."
        )
    ids = {figure.result_id for _, figures in found for figure in figures}
    return of_panels(
        replace(report, title=f"Beside what is claimed for an {CARD}: {report.title}"),
        [each for each in report.results if each["id"] in ids],
        *(_panel(claim, figures) for claim, figures in found),
        note=f"Pale and dotted: a claim, which OptiGPU has not measured ({found[0][0].source}). "
        "All others were measured; lines are 95% intervals.",
    )


def claims(book: Book) -> list[Claim]:
    """The published speeds of the card."""
    speeds = ("tflops", "tokens_per_s", "latency_s")
    return [each for each in book.claims if each.hardware == CARD and each.metric in speeds]


def _panel(claim: Claim, figures: Sequence[Measured]) -> Panel:
    """In the claim's unit."""
    scale = UNITS[claim.unit]
    better = "less" if METRICS[claim.metric].better is Better.LOWER else "more"
    published = Mark(
        label=f"{claim.what}, {claim.precision} (claim)",
        value=claim.value,
        text=f"{short(claim.value)}, claimed",
        claimed=True,
        source=claim.id,
    )
    measured = (
        Mark(
            label=figure.label,
            value=figure.value / scale,
            ci=(figure.ci[0] / scale, figure.ci[1] / scale) if figure.ci else None,
            text=short(figure.value / scale),
            source=figure.result_id,
        )
        for figure in figures
    )
    return Panel(
        title=claim.what.removesuffix(", naive"),
        form=Form.BARS,
        axis=f"{claim.unit} ({better} is better)",
        marks=(published, *measured),
    )


def architecture_data(report: Report) -> ChartData:
    """Of the best variant of a job, or of the first that was measured. Raises SpecError where none was. Levels from the
    top: the model, the layers of the stack, what was measured, the machine."""
    measured = report.measured
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
            Box(heading="Model", lines=(workload_text(variant["workload"], variant["model"]),), level=0),
            *_layers(variant["stack"]),
            Box(heading="Measured", lines=tuple(_lines(result, measured, report)), level=2),
            Box(heading="Machine", lines=(result["environment"]["hardware_class"],), level=3),
        ),
        note=f"The stack: {variant['label']}.",
        origin=origin_line([result]),
    )


def _layers(stack: Sequence[Document]) -> Iterator[Box]:
    """A box for each layer that the stack uses; one that says so where it uses none."""
    layers: dict[str, list[str]] = {} if stack else {"stack": ["no technique: the baseline"]}
    for name in (technique["name"] for technique in stack):
        kind = TECHNIQUES.get(name)
        layers.setdefault(str(kind.layer) if kind else "another version's technique", []).append(name)
    for layer, used in layers.items():
        yield Box(heading=layer.capitalize(), lines=tuple(used), level=1)


def _lines(result: Document, measured: Sequence[Document], report: Report) -> Iterator[str]:
    """Speed, speedup, bytes and loss; what was not measured is named so."""
    variant = result["variant"]
    yield f"{with_interval(primary_of(result))} {heading(variant['primary_metric'])}"
    gain = next((row.speedup for row in report.rows if row.index == variant["index"]), None)
    yield f"{ratio(gain)} the baseline" if gain else "speedup: not measured"
    own = figure_of(result, "weight_bytes")
    baseline = next((each for each in measured if each["variant"]["role"] == Role.BASELINE), None)
    whole = figure_of(baseline, "weight_bytes") if baseline else None
    share = f", {own['value'] / whole['value']:.1%} of the baseline's" if own and whole else ""
    yield f"{short(own['value'] / 1e6)} MB of weights{share}" if own else "bytes of the weights: not measured"
    name = first_measured([result], LOSSES)
    loss = loss_of(result, name)
    yield (
        f"{short(loss[0])}% {LOSSES[name].removesuffix(' (%)')}" if loss and name else "quality: not measured"
    )
    if kernels := facts_of(result).get("attention_kernels"):
        yield f"attention by {', '.join(kernels)}"
