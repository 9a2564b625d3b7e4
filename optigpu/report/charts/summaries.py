"""A report as a table, as a diagram of what was measured, and beside what is claimed for an RTX 5090."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from optigpu.claims import Book, Claim, Measured, baselines, beside, from_results
from optigpu.claims.model import UNITS
from optigpu.documents.older import facts_of
from optigpu.documents.result import AttributionRow
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
    primary_of,
)
from optigpu.report.leaderboard import workload_text
from optigpu.report.numbers import MISSING, ratio, scaled, short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
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
    measured = [each for each in report.results if primary_of(each)["value"] is not None]
    if not measured:
        raise SpecError(
            "No result has a figure for a table; run `optigpu ladder --model preset:gpt2 --stack int8_weight_only`."
        )
    shown, left = measured[:MOST_COLUMNS], measured[MOST_COLUMNS:]
    more = f" Left out: {', '.join(label_of(each) for each in left)}." if left else ""
    return ChartData(
        title=report.title,
        table=Table(headings=("", *(label_of(each) for each in shown)), rows=tuple(_rows(shown, report))),
        note=f'"{MISSING}" was not measured; `optigpu show` prints the reasons. ± and [ ] are 95% intervals.{more}',
        origin=origin_line(shown),
    )


def _rows(shown: Sequence[Document], report: Report) -> list[tuple[str, ...]]:
    rows = report.attribution.rows if report.attribution else ()
    gains = {row.index: row for row in rows}
    loss = first_measured(shown, tuple(LOSSES))
    lines = [
        _row(
            heading(shown[0]["variant"]["primary_metric"]),
            shown,
            lambda each: with_interval(primary_of(each)),
        ),
        _row("speedup", shown, lambda each: _speedup(each, gains)),
        *(_figures(name, shown, metric, scale) for name, metric, scale in FIGURES),
        _row("quality lost (%)", shown, lambda each: _loss(each, loss)),
    ]
    return [line for line in lines if set(line[1:]) != {MISSING}]


def _row(name: str, shown: Sequence[Document], cell: Callable[[Document], str]) -> tuple[str, ...]:
    return (name, *(cell(each) for each in shown))


def _figures(name: str, shown: Sequence[Document], metric: str, scale: float) -> tuple[str, ...]:
    return _row(name, shown, lambda each: scaled(figure_of(each, metric), scale))


def _speedup(result: Document, rows: Mapping[int, AttributionRow]) -> str:
    if result["variant"]["role"] == Role.BASELINE:
        return "1"
    row = rows.get(result["variant"]["index"])
    return ratio(row.speedup) if row else MISSING


def _loss(result: Document, name: str | None) -> str:
    found = loss_of(result, name) if name else None
    return short(found[0]) if found else MISSING


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
    return ChartData(
        title=f"Beside what is claimed for an {CARD}: {report.title}",
        panels=tuple(_panel(claim, figures) for claim, figures in found),
        note=f"Pale and dotted: a claim, which OptiGPU has not measured ({found[0][0].source}). "
        "All others were measured; lines are 95% intervals.",
        origin=origin_line([each for each in report.results if each["id"] in ids]),
    )


def claims(book: Book) -> list[Claim]:
    """The published speeds of the card."""
    return [each for each in book.claims if each.hardware == CARD and _is_speed(each)]


def _is_speed(claim: Claim) -> bool:
    return claim.metric in ("tflops", "tokens_per_s", "latency_s")


def _panel(claim: Claim, figures: Sequence[Measured]) -> Panel:
    """In the claim's unit."""
    scale = UNITS[claim.unit]
    better = "less" if METRICS[claim.metric].better is Better.LOWER else "more"
    return Panel(
        title=claim.what.removesuffix(", naive"),
        form=Form.BARS,
        axis=f"{claim.unit} ({better} is better)",
        marks=(
            Mark(
                label=f"{claim.what}, {claim.precision} (claim)",
                value=claim.value,
                text=f"{short(claim.value)}, claimed",
                claimed=True,
                source=claim.id,
            ),
            *(_mark(figure, scale) for figure in figures),
        ),
    )


def _mark(figure: Measured, scale: float) -> Mark:
    value = figure.value / scale
    return Mark(
        label=figure.label,
        value=value,
        ci=(figure.ci[0] / scale, figure.ci[1] / scale) if figure.ci else None,
        text=short(value),
        source=figure.result_id,
    )


MODEL, LAYERS, MEASURED, MACHINE = range(4)
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
            Box(heading="Measured", lines=tuple(_lines(result, measured, report)), level=MEASURED),
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


def _lines(result: Document, measured: Sequence[Document], report: Report) -> Iterator[str]:
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
