"""The command `selftest`: every technique, kernel and meter against its reference on this machine."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.measuring import stoppable
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_grid
from optigpu.vocabulary import CancelledError, DeviceKind, OptiGPUError

if TYPE_CHECKING:
    from optigpu.documents.selftest import SelfTest

Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only this technique, kernel or meter; may be given several times."),
]
Device = Annotated[DeviceKind | None, typer.Option(help="Only the checks of this device. Default: of each.")]


def add_commands(app: typer.Typer) -> None:
    app.command()(selftest)


def selftest(
    only: Only = None,
    device: Device = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Check every technique, kernel and meter against its reference on this machine, in about two minutes.

    A technique that fails is not run here until the software changes. Exit status 1 if a check failed.
    """
    from optigpu.conductor.selftest import SelfTester
    from optigpu.report import SelfTestProgress, console

    outcomes: list[SelfTest] = []
    with stoppable() as stop, SelfTestProgress(console(stderr=True)) as progress:
        tester = SelfTester(stop, progress.doing, progress.ended)
        try:
            checks = tester.checks(only or (), device)
            progress.expect(len(checks))
            outcomes += tester.run(checks)
        except CancelledError as error:
            echo(f"{error} Nothing of it was kept.", err=True)
            raise typer.Exit(stop.status) from None
    _show(outcomes, format_)
    _keep(outcomes)
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


def _show(outcomes: "list[SelfTest]", form: OutputFormat) -> None:
    from optigpu.conductor.session import environment_for
    from optigpu.report import selftest_csv, selftest_grid

    if form is OutputFormat.JSON:
        echo(json.dumps([outcome.model_dump(mode="json") for outcome in outcomes], indent=2))
    elif form is OutputFormat.CSV:
        echo(selftest_csv(outcomes), nl=False)
    else:
        there = [environment_for(outcome.device) for outcome in outcomes]
        present = [each for each, outcome in zip(there, outcomes, strict=True) if each.has(outcome.device)]
        show_grid(selftest_grid(outcomes, present), form)


def _keep(outcomes: "list[SelfTest]") -> None:
    """Keeps what was found of the devices that are there. What cannot be kept is said, and changes nothing else."""
    from optigpu.conductor.session import environment_for
    from optigpu.selftest.kept import keep

    for outcome in outcomes:
        environment = environment_for(outcome.device)
        if not environment.has(outcome.device):
            continue
        try:
            echo(f"Kept as {keep(outcome, environment)}.", err=True)
        except OptiGPUError as error:
            echo(str(error), err=True)
