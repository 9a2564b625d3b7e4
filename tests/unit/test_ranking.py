"""What a leaderboard ranks and why not, the points that no other surpasses, and speedups of stored figures."""

import math
from typing import Any

import numpy as np
import pytest

from optigpu.documents.older import why_none_ranks
from optigpu.statistics.compare import speedup
from optigpu.statistics.front import compared, unsurpassed
from optigpu.statistics.stored import StoredSummary
from optigpu.vocabulary import Better
from tests.known import known
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


def test_the_front_of_exact_points_is_what_no_other_dominates() -> None:
    points = np.random.default_rng(0).integers(0, 12, size=(60, 2))
    expected = [
        number
        for number, point in enumerate(points)
        if not ((points >= point).all(axis=1) & (points > point).any(axis=1)).any()
    ]
    assert unsurpassed([[(float(x), float(x)) for x in point] for point in points]) == expected
    assert 1 < len(expected) < 30


def test_of_two_equal_points_none_surpasses_the_other() -> None:
    assert unsurpassed([[(1.0, 1.0)], [(1.0, 1.0)]]) == [0, 1]


@pytest.mark.parametrize(
    ("one", "other", "sign"),
    [
        ((3.0, 4.0), (1.0, 2.0), 1),
        ((1.0, 2.0), (3.0, 4.0), -1),
        ((1.0, 3.0), (2.0, 4.0), 0),
        (None, (2.0, 4.0), 0),
    ],
)
def test_intervals_that_overlap_and_what_is_not_known_count_as_equal(
    one: object, other: object, sign: int
) -> None:
    assert compared(one, other) == sign  # type: ignore[arg-type]


def figure(value: float | None, better: Better = Better.HIGHER, **fields: object) -> StoredSummary:
    return StoredSummary.model_validate({"unit": "1/s", "better": better, "value": value} | fields)


def test_it_is_above_one_where_the_candidate_is_better() -> None:
    assert speedup(figure(10.0), figure(40.0)) == (4.0, None)
    assert speedup(figure(10.0, Better.LOWER), figure(2.5, Better.LOWER)) == (4.0, None)


def test_its_interval_adds_the_errors_of_both_sides() -> None:
    """Of two figures known to 3% and 4% (many degrees of freedom) the ratio is known to 5%."""
    sides = [
        figure(1.0, ci=(math.exp(-width), math.exp(width)), freedom=1e6, replicates=3)
        for width in (0.03, 0.04)
    ]
    found = known(speedup(*sides))
    assert [math.log(bound) for bound in known(found[1])] == pytest.approx([-0.05, 0.05], rel=1e-3)


@pytest.mark.parametrize("value", [None, 0.0, -1.0])
def test_what_is_not_positive_has_no_ratio(value: float | None) -> None:
    assert speedup(figure(1.0), figure(value)) is None
    assert speedup(figure(value), figure(1.0)) is None
