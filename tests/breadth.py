"""Cases of a test of which `make test` runs some, and `make test-all` all."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def cases(values: Iterable[Any], by_default: int = 2) -> list[Any]:
    """The values, those after the first ones marked as long. A tuple holds the values of several parameters."""
    return [value if place < by_default else long(value) for place, value in enumerate(values)]


def spread(*lists: Collection[Any], by_default: int = 2) -> list[Any]:
    """All combinations of a value of each list, all but `by_default` of them marked as long.

    The others go from the first value of every list to the last of every list in equal steps, so that a list of at most
    that many values has each of them in one. A tuple in a list holds the values of several parameters.
    """
    chosen = {
        tuple(step * (len(values) - 1) // max(1, by_default - 1) for values in lists)
        for step in range(by_default)
    }
    made = []
    for row in product(*(enumerate(values) for values in lists)):
        case = tuple(part for _, value in row for part in (value if isinstance(value, tuple) else (value,)))
        places = tuple(place for place, _ in row)
        made.append(pytest.param(*case) if places in chosen else long(case))
    return made


def long(value: Any) -> Any:
    """The case of that value, marked as long; other marks stay."""
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.long], id=value.id)
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.long)
