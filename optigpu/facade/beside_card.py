"""Measured figures beside those that are claimed for an RTX 5090."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optigpu.claims import Claim, Measured, baselines, beside, from_results
from optigpu.claims.findings import plain
from optigpu.claims.terms import UNITS
from optigpu.report import Column, Grid
from optigpu.report.charts.summaries import CARD
from optigpu.report.charts.summaries import claims as claims_of_the_card
from optigpu.report.claims import NOT_MEASURED, figure
from optigpu.report.origin import origin_line
from optigpu.vocabulary import Document


@dataclass(frozen=True)
class Beside:
    """One claim for the card, and every measured figure of the same work, on any hardware by any stack."""

    claim: Claim
    measured: tuple[Measured, ...]

    def document(self) -> dict[str, object]:
        """The claim and the figures, in the claim's unit, as plain JSON."""
        claim = self.claim.model_dump(mode="json")
        return {"claim": claim, "measured": [self._figure(each) for each in self.measured]}

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of `beside_grid`: a row for each figure, or one that says that there is none."""
        name, claimed = f"{self.claim.what}, {self.claim.precision}", figure(self.claim)
        for each in self.measured:
            value = plain(each.value / UNITS[self.claim.unit])
            yield name, claimed, each.label, f"{value} {self.claim.unit}", f"{plain(self._of_claim(each))}x"
        if not self.measured:
            yield name, claimed, NOT_MEASURED, "", ""

    def _figure(self, measured: Measured) -> dict[str, object]:
        return {
            "label": measured.label,
            "hardware": measured.hardware,
            "value": measured.value / UNITS[self.claim.unit],
            "of_claim": self._of_claim(measured),
            "result_id": measured.result_id,
        }

    def _of_claim(self, measured: Measured) -> float:
        return self.claim.over(measured.value)


def beside_card(results: Sequence[Document]) -> list[Beside]:
    """The claims for the card's speed, with what the results have beside them."""
    measured = from_results(results)
    return [Beside(claim, tuple(beside(claim, measured))) for claim in claims_of_the_card(baselines())]


def beside_grid(results: Sequence[Document]) -> Grid:
    """The table of `beside_card`."""
    headings = ("claim", "claimed", "measured", "figure", "of the claim")
    return Grid(
        title=f"Beside what is claimed for an {CARD}",
        columns=tuple(Column(each, right=each not in ("claim", "measured")) for each in headings),
        rows=tuple(row for each in beside_card(results) for row in each.rows()),
        notes=(
            "Claims are published figures that OptiGPU has not measured.",
            *filter(None, [origin_line(results)]),
        ),
    )
