"""How long each test took when it last ran, kept in build/test-durations.json: the longest files start first."""

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

KEPT = Path(__file__).resolve().parent.parent / "build" / "test-durations.json"
SHOWN = 30


class Durations:
    """A plugin of the process that hands out the tests: it prints the slowest files and keeps each test's seconds."""

    def __init__(self, kept: Path = KEPT) -> None:
        self._kept = kept
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files = seconds_of_files(self._seconds)
        if len(files) <= SHOWN:
            return
        terminalreporter.section(f"the {SHOWN} slowest files, in seconds")
        for file in sorted(files, key=files.__getitem__, reverse=True)[:SHOWN]:
            terminalreporter.write_line(f"{files[file]:7.1f}  {file}")

    def pytest_sessionfinish(self) -> None:
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        found = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        self._kept.write_text(json.dumps(kept_seconds(self._kept) | found, indent=0, sort_keys=True))


def kept_seconds(kept: Path = KEPT) -> dict[str, float]:
    """The seconds of each test when it last ran; empty before the first run."""
    with suppress(OSError, ValueError):
        found: dict[str, float] = json.loads(kept.read_text())
        return found
    return {}


def seconds_of_files(tests: Mapping[str, float]) -> dict[str, float]:
    """The sum of each file's tests."""
    files: dict[str, float] = defaultdict(float)
    for name, seconds in tests.items():
        files[file_of(name)] += seconds
    return dict(files)


def by_duration(items: list[pytest.Item], seconds: Mapping[str, float]) -> list[pytest.Item]:
    """The tests: first the files that never ran, which may take long, then the others from the slowest on."""
    known = [item.nodeid for item in items if item.nodeid in seconds]
    files = seconds_of_files({name: seconds[name] for name in known})
    return sorted(items, key=lambda item: -files.get(file_of(item.nodeid), float("inf"))) if known else items


def file_of(nodeid: str) -> str:
    """The file of a test's name."""
    return nodeid.partition("::")[0]
