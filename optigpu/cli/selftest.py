"""The command `selftest`: every technique, kernel and meter against its reference on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.measuring import ended_when_stopped
from optigpu.cli.output import FormatOption, OutputFormat, echo, present
from optigpu.vocabulary import DeviceKind, OptiGPUError

if TYPE_CHECKING:
    from optigpu.documents.selftest import SelfTest

Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only this technique, kernel or meter; may be given several times."),
]


def selftest(
    only: Only = None,
    device: Annotated[
        DeviceKind | None, typer.Option(help="Only the checks of this device. Default: of each.")
    ] = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Check every technique, kernel and meter against its reference on this machine, in about two minutes.

    A technique that fails is not run here until the software changes. Exit status 1 if a check failed.
    """
    from optigpu.conductor.selftest import SelfTester
    from optigpu.conductor.session import environment_for
    from optigpu.report import SelfTestProgress, console, selftest_csv, selftest_grid
    from optigpu.selftest.kept import keep

    outcomes: list[SelfTest] = []
    with (
        ended_when_stopped("{} Nothing of it was kept.") as stop,
        SelfTestProgress(console(stderr=True)) as progress,
    ):
        tester = SelfTester(stop, progress.doing, progress.ended)
        checks = tester.checks(only or (), device)
        progress.expect(len(checks))
        outcomes += tester.run(checks)
    there = [(outcome, environment_for(outcome.device)) for outcome in outcomes]
    present_ones = [(outcome, each) for outcome, each in there if each.has(outcome.device)]
    present(
        format_,
        [outcome.model_dump(mode="json") for outcome in outcomes],
        lambda: selftest_csv(outcomes),
        lambda: [selftest_grid(outcomes, [each for _, each in present_ones])],
    )
    for outcome, environment in present_ones:  # what cannot be kept is said, and changes nothing else
        try:
            echo(f"Kept as {keep(outcome, environment)}.", err=True)
        except OptiGPUError as error:
            echo(str(error), err=True)
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)
