"""Cases of a test of which `make test` runs some, and `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], by_default: int = 2) -> list[Any]:
    """The values, those after the first ones marked as long. A tuple holds the values of several parameters."""
    return [value if place < by_default else long(value) for place, value in enumerate(values)]


def long(value: Any) -> Any:
    """The case of that value, marked as long; other marks stay."""
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.long], id=value.id)
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.long)
