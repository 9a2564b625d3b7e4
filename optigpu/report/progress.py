"""Live progress of a job from its events, and of a self-test: a bar on a terminal, else occasional lines. And the table
of a self-test."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
)
from rich.text import Text

from optigpu.documents.result import Environment
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfTest
from optigpu.report.formats import (
    MISSING,
    Grid,
    columns,
    csv_text,
    duration,
    short,
    with_error,
    with_interval,
)
from optigpu.report.rows import heading, origin_line
from optigpu.vocabulary import Document

QUIET_S = 5.0
"""Without a terminal, the shortest time between two lines of mere progress."""


class _TimeLeft(ProgressColumn):
    """The predicted remaining time, counted down between events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock

    def render(self, task: Task) -> Text:
        """For example `about 1:20 left`."""
        ends_at = task.fields["ends_at"]
        return Text("" if ends_at is None else f"about {duration(ends_at - self.clock())} left")


class Spoken:
    """A context manager with a bar for a terminal; elsewhere it may say a line of mere progress every `quiet_s` s."""

    first = "starting"

    def __init__(
        self, console: Console, *, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.quiet_s, self.clock = console, quiet_s, clock
        self.spoken_at = float("-inf")
        columns = (TextColumn("{task.description}"), BarColumn(), *self.columns())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(self.first, total=None, ends_at=None)

    def columns(self) -> tuple[ProgressColumn, ...]:
        """What stands behind the bar."""
        return (TaskProgressColumn(),)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def may_speak(self) -> bool:
        """Whether there is no terminal, and the last line is old enough."""
        return not self.console.is_terminal and self.clock() - self.spoken_at >= self.quiet_s

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        self.spoken_at = self.clock()
        self.bar.console.print(Text(line))


class ShareProgress(Spoken):
    """Shows what is done and which share of it, where that is known: a bar, or without a terminal a line for each
    thing and then at most every `quiet_s` seconds."""

    doing = ""

    def show(self, doing: str, share: float | None = None) -> None:
        """`share` is from 0 to 1; None: not known."""
        self.bar.update(
            self.task, description=doing, total=None if share is None else 1.0, completed=share or 0.0
        )
        if not self.console.is_terminal and (doing != self.doing or (share is not None and self.may_speak())):
            self.say(doing if share is None else f"{share:4.0%}  {doing}")
        self.doing = doing


class RunProgress(Spoken):
    """A context manager that shows the events of one job. The end of a variant is a permanent line. The bar below it
    (without a terminal, a line at most every `quiet_s` seconds) shows the current work."""

    first = "waiting"
    labels: Mapping[int, str] = MappingProxyType({})
    current = 0

    def columns(self) -> tuple[ProgressColumn, ...]:
        return (TaskProgressColumn(), _TimeLeft(self.clock))

    def show(self, kind: str, data: Document) -> None:
        """Shows an event, as `documents.events.as_document` or the service gives it; unknown kinds are ignored. Besides
        events it shows `unserved`, what the service says of a job that no live worker can take."""
        match kind:
            case "planned":
                self.labels = {variant["index"]: variant["label"] for variant in data["variants"]}
                plural = "" if len(self.labels) == 1 else "s"
                self.say(f"{len(self.labels)} variant{plural} to measure: {', '.join(self.labels.values())}")
            case "waiting":
                self.say(f"{data['doing']}, Ctrl-C stops.")
            case "estimated" | "unserved":
                self.say(data["sentence"])
            case "variant_started":
                self.current = data["index"]
                self.bar.update(self.task, description=self._label(self.current))
            case "rough":
                self._rough(data)
            case "progressed":
                self._progressed(data)
            case "variant_finished":
                self._finished_variant(data["outcome"])
            case "state":  # of a service: a job started, was returned to the queue, or ended
                self.bar.update(self.task, description=data["state"])
                if data.get("reason"):
                    self.say(f"{data['state']}: {data['reason']}")

    def _progressed(self, data: Document) -> None:
        left = data.get("remaining_s")
        doing = data["doing"] if data.get("for_all") else f"{self._label(self.current)}: {data['doing']}"
        ends_at = None if left is None else self.clock() + left
        self.bar.update(self.task, description=doing, total=1.0, completed=data["fraction"], ends_at=ends_at)
        if self.may_speak():
            about = "" if left is None else f", about {duration(left)} left"
            self.say(f"{data['fraction']:4.0%}  {doing}{about}")

    def _rough(self, data: Document) -> None:
        rough = data["rough"]
        speed = f"{with_error(rough['value'], rough['ci'])} {heading(rough['metric'])}"
        times = f", {short(rough['ratio'])}x" if rough["ratio"] else ""
        agreement = rough["top1_agreement"]
        quality = "" if agreement is None else f", top-1 {agreement:.1%}"
        self.say(f"{self._label(data['index'])}: about {speed}{times}{quality}")

    def _finished_variant(self, outcome: Document) -> None:
        label, result = self._label(outcome["index"]), outcome.get("result")
        if result is None:
            self.say(f"{label}: {outcome['status']}: {outcome['reason']}")
            return
        name = result["variant"]["primary_metric"]
        invalid = "" if result["verdict"]["valid"] else " (invalid)"
        self.say(f"{label}: {with_interval(result['metrics'].get(name))} {heading(name)}{invalid}")

    def _label(self, index: int) -> str:
        return self.labels.get(index, f"variant {index}")


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

    _ended, _count = 0, 0

    def columns(self) -> tuple[ProgressColumn, ...]:
        return (MofNCompleteColumn(),)

    def expect(self, count: int) -> None:
        """So many checks will run."""
        self._count, self.spoken_at = count, self.clock()
        self.bar.update(self.task, total=count)

    def doing(self, text: str) -> None:
        """What goes on now."""
        self.bar.update(self.task, description=text)
        if self.may_speak():
            self.say(f"{self._ended}/{self._count}  {text}")

    def ended(self, result: CheckResult) -> None:
        """A check has ended."""
        self._ended += 1
        self.bar.update(self.task, completed=self._ended)
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
    check = result.check.model_dump(include={"subject", "name", "case", "device"})
    return check | result.model_dump(mode="json", exclude={"check"})
