"""The benchmark of the founding table of expected impact: its jobs can be posted, and what was not measured is null
with the reason. Figures are made up."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.expected_impact import Figure, answers_of
from benchmarks.impact_rows import ROWS, Asked
from optigpu.documents.result import Measurement, Outcome, Verdict
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.measure import Report
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import Role, VariantStatus
from tests.unit.made_results import result

ASKED = Asked(replicates=2, folder=Path("unused"))
MAKING = {"impact-int4", "impact-distillation", "impact-pruning"}
"""Rows whose questions make models first."""


@pytest.mark.parametrize("row", [row for row in ROWS if row.claims not in MAKING], ids=lambda row: row.name)
def test_the_jobs_of_a_row_compare_two_ways_or_more(row: Any) -> None:
    for question in row.questions(ASKED):
        assert question.spec is not None
        assert len(variants_of(question.spec)) >= 2
        assert question.spec.measure.replicates == 2


def outcome(index: int, rate: float, weight_bytes: float) -> Outcome:
    """What a job leaves of a variant: seven equal requests in each of two processes."""
    samples = {"tokens_per_s": ((rate,) * 7,) * 2, "weight_bytes": ((weight_bytes,),) * 2}
    metrics = {name: summarise(Measurement(name=name, samples=each)) for name, each in samples.items()}
    made = result(index, Role.SINGLE, f"v{index}", metrics, Verdict(valid=True))
    return Outcome(index=index, status=VariantStatus.SUCCEEDED, result=made, samples=samples)


def test_a_figure_is_a_ratio_of_speeds_and_shares_of_bytes() -> None:
    (question, _) = ROWS[0].questions(ASKED)
    assert question.spec is not None
    outcomes = {0: outcome(0, 100.0, 8e6), 1: outcome(1, 150.0, 4e6)}
    attribution = attribute(question.spec, variants_of(question.spec), outcomes)
    report = Report(
        spec=question.spec, results=(), outcomes=tuple(outcomes.values()), attribution=attribution
    )
    (figure,) = answers_of("decoding", report)
    assert figure.what == "decoding"
    assert figure.ratio == pytest.approx(1.5)
    assert (figure.weight_bytes, figure.peak_bytes, figure.kld_mean) == (0.5, None, None)
    failed = Outcome(index=1, status=VariantStatus.FAILED, reason="out of memory")
    attribution = attribute(question.spec, variants_of(question.spec), outcomes | {1: failed})
    report = Report(spec=question.spec, results=(), outcomes=(outcomes[0], failed), attribution=attribution)
    assert list(answers_of("decoding", report)) == [Figure("decoding", reasons=("out of memory",))]
