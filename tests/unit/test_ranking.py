"""Whether a leaderboard ranks what a job measured, and why not."""

from typing import Any

import pytest

from optigpu.documents.ranking import why_none_ranks
from tests.unit.made_results import BASELINE, WRONG

GOOD: dict[str, Any] = BASELINE.model_dump(mode="json")
INVALID: dict[str, Any] = WRONG.model_dump(mode="json")
SILENT = GOOD | {"metrics": {"tokens_per_s": GOOD["metrics"]["tokens_per_s"] | {"value": None}}}


@pytest.mark.parametrize("results", [[], [GOOD], [INVALID, GOOD], [SILENT, INVALID, GOOD]])
def test_one_result_that_ranks_is_enough(results: list[dict[str, Any]]) -> None:
    assert why_none_ranks(results) is None


def test_the_reasons_are_counted_and_the_first_is_explained() -> None:
    assert why_none_ranks([INVALID, INVALID, SILENT]) == (
        "Nothing that was measured can be ranked: output_invalid (2 of 3), no figure (1 of 3). The logits hold NaN."
    )


def test_a_result_without_its_metric_or_notes_is_told_as_well() -> None:
    bare = GOOD | {"metrics": {}, "verdict": {"valid": True}}
    assert why_none_ranks([bare]) == "Nothing that was measured can be ranked: no figure (1 of 1)."
