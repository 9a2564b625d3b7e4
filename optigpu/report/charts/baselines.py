"""Results beside what is claimed for an RTX 5090."""

from collections.abc import Sequence
from dataclasses import replace

from optigpu.claims.matching import Measured, beside, from_results
from optigpu.claims.model import UNITS, Book, Claim, baselines
from optigpu.report.charts.marks import (
    ChartData,
    Form,
    Mark,
    Panel,
    Report,
    of_panels,
)
from optigpu.report.numbers import short
from optigpu.vocabulary import METRICS, Better, SpecError

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
