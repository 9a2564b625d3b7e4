"""The points that no other surpasses, beside a definition that is written another way."""

import numpy as np
import pytest

from optigpu.statistics.front import compared, unsurpassed


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
