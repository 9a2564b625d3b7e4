"""The paths of a C++ operator that this CPU can run; what it lacks, another machine tests."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Name = TypeVar("Name", bound=str)


def paths_that_run(
    numbers: Mapping[Name, int], reason: str | None, call: Callable[[int], object]
) -> list[Name]:
    """Those of `numbers` by which `call` runs the operator, which refuses what the CPU lacks; the newest last."""
    assert reason is None, reason
    return [name for name, number in numbers.items() if _runs(call, number)]


def assert_keeps_promises(operator: Any, *arguments: object) -> None:
    """To PyTorch: its schema, the shapes that it says, and both where they are traced."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator.default, arguments, test_utils=checks)


def _runs(call: Callable[[int], object], number: int) -> bool:
    try:
        call(number)
    except RuntimeError as error:
        if f"this CPU lacks instruction set {number}" in str(error):
            return False
        raise
    return True
