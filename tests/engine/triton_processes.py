"""Processes for Triton's kernels: whether one is interpreted or compiled is settled when its module is imported."""

import os
import subprocess
import sys
from pathlib import Path


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
