"""The table of a self-test, and a line of progress while it runs."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from optigpu.documents.result import Environment
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfTest
from optigpu.report.formats import Grid, columns, csv_text
from optigpu.report.numbers import MISSING
from optigpu.report.progress import QUIET_S, Spoken
from optigpu.report.rows import origin_line

CSV_FIELDS = (
    "subject", "name", "case", "device", "status", "error", "bound", "of", "seconds", "how", "reason",
)  # fmt: skip


def selftest_grid(outcomes: Sequence[SelfTest], environments: Sequence[Environment]) -> Grid:
    """A row for each check, those that failed first; `environments` are those of the devices that are there. A device
    on which no check was started has one row for them all."""
    started = [outcome for outcome in outcomes if not _is_absent(outcome)]
    absent = [outcome for outcome in outcomes if _is_absent(outcome)]
    ended_at = max((outcome.ended_at.isoformat() for outcome in outcomes), default="")
    there = [{"created_at": ended_at, "environment": each.model_dump(mode="json")} for each in environments]
    results = sorted(_results(started), key=lambda result: result.status is not CheckStatus.FAILED)
    rows = (
        *map(_cells, results),
        *((f"all {len(each.results)} checks", *_cells(each.results[0])[1:]) for each in absent),
    )
    return Grid(
        title="Self-test of this machine",
        columns=columns(
            "check", "device", "result", "largest error:", "bound:", "of", "time (s):", "how, or why not"
        ),
        rows=rows,
        notes=(summary_line(outcomes), *filter(None, [origin_line(there) if outcomes else None])),
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


class SelfTestProgress(Spoken):
    """A context manager that shows a bar on a terminal, else a line at most every `quiet_s` seconds. A check that
    failed is a permanent line."""

    def __init__(
        self, console: Console, *, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        super().__init__(console, *columns, quiet_s=quiet_s, clock=clock)
        self.spoken_at = clock()
        self._ended, self._count = 0, 0
        self._task = self.bar.add_task("starting", total=None)

    def expect(self, count: int) -> None:
        """So many checks will run."""
        self._count = count
        self.bar.update(self._task, total=count)

    def doing(self, text: str) -> None:
        """What goes on now."""
        self.bar.update(self._task, description=text)
        if self.may_speak():
            self.say(f"{self._ended}/{self._count}  {text}")

    def ended(self, result: CheckResult) -> None:
        """A check has ended."""
        self._ended += 1
        self.bar.update(self._task, completed=self._ended)
        if result.status is CheckStatus.FAILED:
            self.say(f"{result.check.label} on {result.check.device} failed: {result.reason}")


def _results(outcomes: Sequence[SelfTest]) -> list[CheckResult]:
    return [result for outcome in outcomes for result in outcome.results]


def _is_absent(outcome: SelfTest) -> bool:
    return len(outcome.results) > 1 and all(result.seconds is None for result in outcome.results)


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
