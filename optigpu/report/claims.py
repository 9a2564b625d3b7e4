"""Published figures beside measured ones: a table, flat records, and plain JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.claims import Book, Claim, Judgement, Measured, Plausibility, Thesis, judge, measured_for
from optigpu.claims.model import UNITS
from optigpu.report.formats import Column, Grid, csv_text
from optigpu.report.numbers import short
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
        """The measured figure over the claimed one."""
        return self.measured.value / self.claim.quantity if self.measured else None


def claim_rows(book: Book, measured: Sequence[Measured]) -> list[ClaimRow]:
    return [ClaimRow(claim, judge(claim, book), measured_for(claim, measured)) for claim in book.claims]


def claims_grid(rows: Sequence[ClaimRow], thesis: Thesis) -> Grid:
    """The thesis, then each claim."""
    headings = ("claim", "figure", "hardware", "plausibility", "why", "measured")
    right = {"figure"}
    return Grid(
        title="Published figures, and what was measured on the same hardware",
        columns=tuple(Column(heading, right=heading in right) for heading in headings),
        rows=(_thesis_cells(thesis), *map(_cells, rows)),
        notes=tuple(_notes(rows)),
        faint=frozenset(
            number
            for number, row in enumerate(rows, start=1)
            if row.judgement.plausibility is Plausibility.UNCHECKED and row.measured is None
        ),
    )


def _cells(row: ClaimRow) -> tuple[str, ...]:
    claim = row.claim
    return (
        f"{claim.what}, {claim.precision}" if claim.precision else claim.what,
        figure(claim),
        claim.hardware or "none named",
        str(row.judgement.plausibility),
        " ".join(finding.sentence for finding in row.judgement.reasons),
        _measured(row),
    )


def figure(claim: Claim) -> str:
    """The figure as it was printed, with the counted thing if the unit does not name it."""
    of = {"perplexity": "perplexity", "growth_exponent": "power"}.get(claim.metric)
    return f"{of} {claim.value:g}" if of else f"{claim.value:g} {claim.unit}"


def _measured(row: ClaimRow) -> str:
    if row.measured is None or row.of_claim is None:
        return NOT_MEASURED
    value = row.measured.value / UNITS[row.claim.unit]
    unit = "" if row.claim.unit == "1" else f" {row.claim.unit}"
    return f"{short(value)}{unit} ({row.of_claim:.2f}x the claim): {row.measured.label}"


def _thesis_cells(thesis: Thesis) -> tuple[str, ...]:
    gap = thesis.optimization
    interval = f" [{gap.ci[0]:.2f}, {gap.ci[1]:.2f}]" if gap and gap.ci else ""
    return (
        thesis.sentence,
        "",
        f"{thesis.hardware.smaller} and {thesis.hardware.larger}",
        "" if gap is None else str(thesis.verdict),
        thesis.hardware.sentence,
        f"{gap.ratio:.2f}x{interval} {gap.metric} by {gap.label} on {gap.hardware}" if gap else NOT_MEASURED,
    )


def _notes(rows: Sequence[ClaimRow]) -> list[str]:
    counts = {each: sum(row.judgement.plausibility is each for row in rows) for each in Plausibility}
    return [
        ", ".join(f"{count} {plausibility}" for plausibility, count in counts.items()) + ".",
        "implausible: contradicts arithmetic or a limit of the hardware. doubtful: contradicts itself or cannot be "
        "checked. plausible: passed every rule that applies. unchecked: no rule applies.",
        "Peaks come from the catalog. Where units, rounding or bytes are ambiguous, the reading that favours the "
        "claim counts.",
    ]


CSV_FIELDS = (
    "id", "text", "source", "status", "what", "hardware", "workload", "model", "precision", "metric",
    "value", "unit", "plausibility", "rules", "why",
    "measured", "measured_unit", "measured_low", "measured_high", "measured_label", "measured_hardware",
    "measured_of_claim", "result_id",
)  # fmt: skip
"""The columns of the CSV form."""


def claims_csv(rows: Sequence[ClaimRow]) -> str:
    """The claims as flat records. The measured figure is in the claim's unit, empty if there is none."""
    return csv_text(CSV_FIELDS, [_record(row) for row in rows])


def _record(row: ClaimRow) -> dict[str, object]:
    claim, measured = row.claim, row.measured
    record = {name: value for name, value in claim.model_dump(mode="json").items() if name in CSV_FIELDS}
    record |= {
        "plausibility": str(row.judgement.plausibility),
        "rules": " ".join(finding.rule for finding in row.judgement.reasons),
        "why": " ".join(finding.sentence for finding in row.judgement.reasons),
    }
    if measured is None:
        return record
    scale = UNITS[claim.unit]
    low, high = measured.ci or (None, None)
    return record | {
        "measured": measured.value / scale,
        "measured_unit": claim.unit,
        "measured_low": None if low is None else low / scale,
        "measured_high": None if high is None else high / scale,
        "measured_label": measured.label,
        "measured_hardware": measured.hardware,
        "measured_of_claim": row.of_claim,
        "result_id": measured.result_id,
    }


def claims_document(rows: Sequence[ClaimRow], thesis: Thesis) -> Document:
    """`{"thesis", "claims"}` as plain JSON: each claim with its findings; null where nothing was measured."""
    return {"thesis": thesis.model_dump(mode="json"), "claims": [_document(row) for row in rows]}


def _document(row: ClaimRow) -> dict[str, object]:
    measured = row.measured
    return row.claim.model_dump(mode="json") | {
        "plausibility": str(row.judgement.plausibility),
        "findings": [finding.model_dump(mode="json") for finding in row.judgement.findings],
        "measured": None
        if measured is None
        else {
            "metric": measured.metric,
            "value": measured.value,
            "ci": measured.ci,
            "label": measured.label,
            "hardware": measured.hardware,
            "result_id": measured.result_id,
            "of_claim": row.of_claim,
        },
    }
