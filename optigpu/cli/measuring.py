"""Runs a job on this machine for a command: with progress on stderr, kept at its end.

Ctrl-C, SIGTERM and the end of the terminal are requests to stop it and to keep what is finished.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from optigpu.cli.output import NOTHING_RANKED, OutputFormat, echo, show_job
from optigpu.vocabulary import CancelledError, DeviceKind, Document, VariantStatus

if TYPE_CHECKING:
    from optigpu.documents.events import Event
    from optigpu.job.spec import JobSpec
    from optigpu.measure import Report


@dataclass(frozen=True)
class Measured:
    """A report, also as JSON, the exit status of a command that ends with it, and why nothing in it can be ranked. The
    status is 1 if no variant succeeded, NOTHING_RANKED, 130 if Ctrl-C stopped it (143: SIGTERM), else 0."""

    report: "Report"
    document: Document
    status: int
    unranked: str | None

    def end(self) -> None:
        """Ends the command where the status is another than 0."""
        if self.status:
            raise typer.Exit(self.status)


def default_device() -> DeviceKind:
    """CUDA where this machine has a GPU, else the CPU."""
    from optigpu.hardware import best_device

    return best_device()


def measure_and_show(spec: "JobSpec", form: OutputFormat, *, verbose: bool = False) -> None:
    """Measures a job and prints it; a status other than 0 ends the command."""
    measured = measure(spec)
    show(measured, form, verbose=verbose)
    measured.end()


def measure(spec: "JobSpec") -> Measured:
    """Runs a job with progress on stderr, and keeps its report. Raises UnsupportedError where a model is missing."""
    from optigpu.documents.events import as_document
    from optigpu.documents.versions import why_none_ranks
    from optigpu.measure import run
    from optigpu.models.held import require_held
    from optigpu.models.reference import parse_reference
    from optigpu.report.formats import console
    from optigpu.report.progress import RunProgress
    from optigpu.runs import Keeper

    for model in filter(None, spec.asked_models):
        require_held(parse_reference(model))
    keeper = Keeper()
    with stoppable() as stop, RunProgress(console(stderr=True)) as progress:

        def listen(event: "Event") -> None:
            keeper.saw(event)
            progress.show(event.kind, as_document(event))

        report = run(spec, listen, cancelled=stop)
    if report.results:
        kept = keeper.keep(report)
        echo(f"Kept as {kept.path}; `optigpu show last` shows it again.", err=True)
    document = report.document()
    unranked = why_none_ranks(document["results"])
    if report.cancelled:
        status = stop.status
    elif not any(outcome.status is VariantStatus.SUCCEEDED for outcome in report.outcomes):
        status = 1
    else:
        status = NOTHING_RANKED if unranked else 0
    return Measured(report, document, status, unranked)


def show(measured: Measured, form: OutputFormat, *, verbose: bool = False) -> None:
    """Prints the table on stdout, and what there is to explain."""
    show_job(measured.document, measured.report.attribution, form, brief=not verbose)
    explain(measured)


def explain(measured: Measured) -> None:
    """Prints on stderr why the job ended early and why nothing can be ranked."""
    for reason in filter(None, (measured.report.stopped, measured.unranked)):
        echo(reason, err=True)


SIGNALS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "the end of its terminal",
}
"""The signals that stop a job, and what they are called."""


class Stop:
    """Whether somebody asked for an end."""

    def __init__(self) -> None:
        self._number: signal.Signals | None = None

    def ask(self, number: int, _: object) -> None:
        """The signals' handler. The second signal ends the command at once."""
        if self._number is not None:
            raise KeyboardInterrupt
        self._number = signal.Signals(number)

    def __call__(self) -> str | None:
        """The reason to stop, if there is one."""
        return f"The job was cancelled by {SIGNALS[self._number]}." if self._number is not None else None

    @property
    def status(self) -> int:
        """The exit status of a command that was stopped, as a shell gives it."""
        return 128 + (self._number or signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Yields what a run asks for a reason to stop. A signal that was ignored when the command started stays ignored."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_when_stopped(words: str = "") -> Iterator[Stop]:
    """As `stoppable`. What is cancelled within ends the command with that status, and with the words on stderr."""
    with stoppable() as stop:
        try:
            yield stop
        except CancelledError as error:
            if words:
                echo(words.format(error), err=True)
            raise typer.Exit(stop.status) from None
