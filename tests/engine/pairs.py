"""Fewer combinations than all: any two values of different lists meet in one of them."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

Value = tuple[int, int]
"""Which list, and which of its values."""


def pairwise(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each list; each time the one with the most pairs that did not meet yet."""
    rows = [tuple(enumerate(row)) for row in product(*(range(len(values)) for values in lists))]
    missing = {pair for row in rows for pair in combinations(row, 2)}
    chosen: list[tuple[Value, ...]] = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(combinations(row, 2))))
        missing.difference_update(combinations(best, 2))
        chosen.append(best)
    return [tuple(lists[which][index] for which, index in row) for row in chosen]
