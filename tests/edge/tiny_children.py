"""Devices of MLPerf Tiny's protocol as children on pseudo-terminals."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.pages import ROOT


@contextmanager
def small_device(*arguments: str) -> Iterator[str]:
    """tests.edge.tiny_device with these arguments; yields its pseudo-terminal's name."""
    with child([sys.executable, "-m", "tests.edge.tiny_device", *arguments]) as name:
        yield name


@contextmanager
def micro_device(python: Path, model: Path, *arguments: str) -> Iterator[str]:
    """The host agent with the real TFLite Micro behind it."""
    with child([str(python), "-m", "esp32_agent.tiny", "--model", str(model), "--pty", *arguments]) as name:
        yield name


@contextmanager
def child(command: list[str]) -> Iterator[str]:
    """Starts it, yields the line that it prints first, and ends it; it must have lived so long."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        name = process.stdout.readline().strip()
        assert name, process.communicate()[1]
        yield name
        assert process.poll() is None, process.communicate()[1]
    finally:
        process.kill()
        process.communicate()
