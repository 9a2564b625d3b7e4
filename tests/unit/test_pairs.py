"""The pairwise selection that replaces a full product of parameters in the engine's tests."""

from itertools import product
from typing import Any

from tests.engine.pairs import pairwise


def test_any_two_values_meet_in_fewer_rows_than_all() -> None:
    lists: list[list[Any]] = [["a", "b", "c", "d"], [1, 2, 3], [True, False]]
    rows = pairwise(*lists)
    for first in range(3):
        for second in range(first + 1, 3):
            met = {(row[first], row[second]) for row in rows}
            assert met == set(product(lists[first], lists[second]))
    assert 12 <= len(rows) <= 14 < 24


def test_two_lists_are_the_full_product() -> None:
    assert sorted(pairwise([1, 2], [3, 4])) == list(product([1, 2], [3, 4]))
