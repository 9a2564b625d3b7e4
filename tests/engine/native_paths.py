"""The paths of a C++ operator that this CPU can run; what it lacks, another machine tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
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


def assert_right(code: str, variables: dict[str, str]) -> None:
    """Python code that prints "right" at its end does so in a process with these variables of the environment."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr
