"""A speedup of two stored figures that were not measured side by side."""

import math

import pytest

from optigpu.statistics.speedup import speedup
from optigpu.statistics.stored import StoredSummary
from optigpu.vocabulary import Better


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
    found = speedup(*sides)
    assert found is not None
    assert found[1] is not None
    assert [math.log(bound) for bound in found[1]] == pytest.approx([-0.05, 0.05], rel=1e-3)


@pytest.mark.parametrize("value", [None, 0.0, -1.0])
def test_what_is_not_positive_has_no_ratio(value: float | None) -> None:
    assert speedup(figure(1.0), figure(value)) is None
    assert speedup(figure(value), figure(1.0)) is None
