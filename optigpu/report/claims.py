"""Published figures beside measured ones: a table, and plain JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.claims.matching import Measured, measured_for, why_never
from optigpu.claims.model import UNITS, Book, Claim, Plausibility, Status, plain, printed
from optigpu.claims.rules import Judgement, judge
from optigpu.claims.thesis import FoundingComparison, Thesis
from optigpu.hardware.catalog import find, find_class
from optigpu.report.formats import Grid, columns
from optigpu.vocabulary import Document

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ClaimRow:
    """A claim, its judgement, and the best measured figure for it."""

    claim: Claim
    judgement: Judgement
    measured: Measured | None

    @property
    def of_claim(self) -> float | None:
        """The measured figure over the claimed one; over the nearest end of a range, 1 within it."""
        return self.claim.over(self.measured.value) if self.measured else None


def claim_rows(book: Book, measured: Sequence[Measured]) -> list[ClaimRow]:
    return [ClaimRow(claim, judge(claim, book), measured_for(claim, measured, book)) for claim in book.claims]


def claims_grid(rows: Sequence[ClaimRow], thesis: Thesis, founding: FoundingComparison | None = None) -> Grid:
    """The thesis, the founding comparison, then each claim."""
    first = (_thesis_cells(thesis), *([_founding_cells(founding)] if founding else ()))
    return Grid(
        title="Published figures, and what was measured on the same hardware",
        columns=columns("claim", "figure:", "status", "hardware", "plausibility", "why", "measured"),
        rows=(*first, *map(_cells, rows)),
        notes=tuple(_notes(rows)),
        faint=frozenset(
            number
            for number, row in enumerate(rows, start=len(first))
            if row.judgement.plausibility is Plausibility.UNCHECKED and row.measured is None
        ),
    )


def _cells(row: ClaimRow) -> tuple[str, ...]:
    claim = row.claim
    return (
        f"{claim.what}, {claim.precision}" if claim.precision else claim.what,
        figure(claim),
        str(claim.status),
        claim.hardware or "none named",
        str(row.judgement.plausibility),
        " ".join(finding.sentence for finding in row.judgement.reasons),
        measured_text(row),
    )


def figure(claim: Claim) -> str:
    """The figure as it was printed, with the counted thing if the unit does not name it."""
    of = {"perplexity": "perplexity", "growth_exponent": "power"}.get(claim.metric)
    return f"{of} {plain(claim.value, 12)}" if of else printed(claim)


def measured_text(row: ClaimRow) -> str:
    """The measured figure in the claim's unit, on which hardware if it is another; or why there is none."""
    if row.measured is None or row.of_claim is None:
        reason = why_never(row.claim)
        return f"{NOT_MEASURED}: {reason}" if reason else NOT_MEASURED
    value = plain(row.measured.value / UNITS[row.claim.unit])
    unit = {"1": "", "%": "%", "x": "x"}.get(row.claim.unit, f" {row.claim.unit}")
    named = row.claim.hardware and find(row.claim.hardware) is find_class(row.measured.hardware)
    where = "" if named else f" on {row.measured.hardware}"
    return f"{value}{unit} ({plain(row.of_claim)}x the claim): {row.measured.label}{where}"


def _thesis_cells(thesis: Thesis) -> tuple[str, ...]:
    gap = thesis.optimization
    interval = f" [{gap.ci[0]:.2f}, {gap.ci[1]:.2f}]" if gap and gap.ci else ""
    return (
        thesis.sentence,
        "",
        str(Status.CLAIMED),
        f"{thesis.hardware.smaller} and {thesis.hardware.larger}",
        "" if gap is None else str(thesis.verdict),
        thesis.hardware.sentence,
        f"{gap.ratio:.2f}x{interval} {gap.metric} by {gap.label} on {gap.hardware}" if gap else NOT_MEASURED,
    )


def _founding_cells(founding: FoundingComparison) -> tuple[str, ...]:
    """Its own arithmetic and the predictions say why it is plausible or not; what was measured stands by itself."""
    arithmetic = founding.arithmetic
    predictions = (each.sentence for each in founding.predictions)
    return (
        founding.sentence,
        f"{plain(arithmetic.claimed_ratio)}x",
        str(Status.CLAIMED),
        f"{arithmetic.smaller.hardware} and {arithmetic.larger.hardware}",
        str(founding.plausibility),
        " ".join([*arithmetic.sentences, *predictions]),
        _founding_measured(founding),
    )


def _founding_measured(founding: FoundingComparison) -> str:
    device, worker = founding.device, founding.worker
    if device is None:
        return NOT_MEASURED
    there = (
        f"{plain(device.fps_per_watt)} FPS/W by {device.network} on {device.board} ({device.power_source})"
    )
    if worker is None or founding.ratio is None:
        return f"{there}; no worker's energy for the same network"
    beside = f"{plain(worker.fps_per_watt)} FPS/W by {worker.backend} on {worker.hardware}"
    return f"{plain(founding.ratio)}x, {founding.verdict}: {there} against {beside}"


def _notes(rows: Sequence[ClaimRow]) -> list[str]:
    counts = {each: sum(row.judgement.plausibility is each for row in rows) for each in Plausibility}
    return [
        ", ".join(f"{count} {plausibility}" for plausibility, count in counts.items()) + ".",
        "implausible: contradicts arithmetic or a limit of the hardware. doubtful: contradicts itself or cannot be "
        "checked. plausible: passed every rule that applies. unchecked: no rule applies.",
        "not measured: no result given is of the same thing; a reason says why none can be.",
        "Peaks come from the catalog. Where units, rounding or bytes are ambiguous, the reading that favours the "
        "claim counts.",
    ]


MEASURED_FIELDS = ("metric", "value", "ci", "label", "hardware", "result_id")


def claims_document(
    rows: Sequence[ClaimRow], thesis: Thesis, founding: FoundingComparison | None = None
) -> Document:
    """`{"thesis", "founding", "claims"}` as plain JSON: each claim with its findings; null where nothing was measured.
    `not_measurable` says why no result can be of the same thing as a claim."""
    return {
        "thesis": thesis.model_dump(mode="json"),
        "founding": founding.model_dump(mode="json") if founding else None,
        "claims": [_document(row) for row in rows],
    }


def _document(row: ClaimRow) -> dict[str, object]:
    measured = row.measured
    return row.claim.model_dump(mode="json") | {
        "plausibility": str(row.judgement.plausibility),
        "not_measurable": why_never(row.claim),
        "findings": [finding.model_dump(mode="json") for finding in row.judgement.findings],
        "measured": None
        if measured is None
        else {name: getattr(measured, name) for name in MEASURED_FIELDS} | {"of_claim": row.of_claim},
    }
