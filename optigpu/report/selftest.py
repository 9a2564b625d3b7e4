"""The table of a self-test, and a line of progress while it runs."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from optigpu.documents.result import Environment
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfTest
from optigpu.report.formats import Column, Grid, csv_text
from optigpu.report.numbers import MISSING
from optigpu.report.origin import origin_line
from optigpu.report.progress import QUIET_S

COLUMNS = (
    Column("check"),
    Column("device"),
    Column("result"),
    Column("largest error", right=True),
    Column("bound", right=True),
    Column("of"),
    Column("time (s)", right=True),
    Column("how, or why not"),
)
CSV_FIELDS = (
    "subject", "name", "case", "device", "status", "error", "bound", "of", "seconds", "how", "reason",
)  # fmt: skip


def selftest_grid(outcomes: Sequence[SelfTest], environments: Sequence[Environment]) -> Grid:
    """A row for each check, those that failed first; `environments` are those of the devices that are there.

    A device on which no check was started has one row for them all.
    """
    started = [outcome for outcome in outcomes if not _is_absent(outcome)]
    absent = [outcome for outcome in outcomes if _is_absent(outcome)]
    results = sorted(_results(started), key=lambda result: result.status is not CheckStatus.FAILED)
    rows = (*map(_cells, results), *map(_cells_of_absent, absent))
    return Grid(
        title="Self-test of this machine",
        columns=COLUMNS,
        rows=rows,
        notes=(summary_line(outcomes), *_origin(outcomes, environments)),
        faint=frozenset(n for n, cells in enumerate(rows) if cells[2] == CheckStatus.NOT_POSSIBLE),
    )


def selftest_csv(outcomes: Sequence[SelfTest]) -> str:
    """The same as raw values; empty where a value is missing."""
    return csv_text(CSV_FIELDS, [_record(result) for result in _results(outcomes)])


def summary_line(outcomes: Sequence[SelfTest]) -> str:
    """How many checks ended how, and which failed."""
    statuses = [result.status for result in _results(outcomes)]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in CheckStatus)
    failed = dict.fromkeys(result.check.name for outcome in outcomes for result in outcome.failed)
    return f"{counts}. Failed: {', '.join(failed)}." if failed else f"{counts}."


class SelfTestProgress:
    """A context manager that shows a bar on a terminal, else a line at most every `quiet_s` seconds.

    A check that failed is a permanent line.
    """

    def __init__(
        self, console: Console, *, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._quiet_s, self._clock = console, quiet_s, clock
        self._spoken_at = clock()
        self._ended, self._count = 0, 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def expect(self, count: int) -> None:
        """So many checks will run."""
        self._count = count
        self._bar.update(self._task, total=count)

    def doing(self, text: str) -> None:
        """What goes on now."""
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal and self._clock() - self._spoken_at >= self._quiet_s:
            self._say(f"{self._ended}/{self._count}  {text}")

    def ended(self, result: CheckResult) -> None:
        """A check has ended."""
        self._ended += 1
        self._bar.update(self._task, completed=self._ended)
        if result.status is CheckStatus.FAILED:
            self._say(f"{result.check.label} on {result.check.device} failed: {result.reason}")

    def _say(self, line: str) -> None:
        self._spoken_at = self._clock()
        self._bar.console.print(Text(line))


def _results(outcomes: Sequence[SelfTest]) -> list[CheckResult]:
    return [result for outcome in outcomes for result in outcome.results]


def _is_absent(outcome: SelfTest) -> bool:
    return len(outcome.results) > 1 and all(result.seconds is None for result in outcome.results)


def _cells_of_absent(outcome: SelfTest) -> tuple[str, ...]:
    first, count = outcome.results[0], len(outcome.results)
    return (f"all {count} checks", *_cells(first)[1:])


def _cells(result: CheckResult) -> tuple[str, ...]:
    return (
        result.check.label,
        str(result.check.device),
        str(result.status),
        _number(result.error),
        _number(result.bound),
        result.of or "",
        MISSING if result.seconds is None else f"{result.seconds:.1f}",
        result.reason or result.how or "",
    )


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2g}"


def _record(result: CheckResult) -> dict[str, object]:
    check = result.check
    return {
        "subject": check.subject,
        "name": check.name,
        "case": check.case,
        "device": check.device,
        **result.model_dump(mode="json", exclude={"check"}),
    }


def _origin(outcomes: Sequence[SelfTest], environments: Sequence[Environment]) -> list[str]:
    ended_at = max((outcome.ended_at for outcome in outcomes), default=None)
    if ended_at is None:
        return []
    documents = [
        {"created_at": ended_at.isoformat(), "environment": environment.model_dump(mode="json")}
        for environment in environments
    ]
    line = origin_line(documents)
    return [line] if line else []
