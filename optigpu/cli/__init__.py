"""The `optigpu` command. Commands import what they need when they run, so that `--help` is fast."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from optigpu import __version__
from optigpu.cli import advise, gate, local, models, remote, runs
from optigpu.cli.options import (
    add_flagged,
    job_panels,
    ladder_panels,
    query_panels,
    recipe_panels,
    replay_panels,
)
from optigpu.cli.output import checked_stderr, checked_stdout, echo
from optigpu.vocabulary import OptiGPUError, ServiceError, SpecError

EXIT_STATUS = (
    "Exit status: 0 done; 1 failed; 2 a wrong request; 3 measured, and no result can be ranked; 130 interrupted (143: "
    "SIGTERM)."
)

app = typer.Typer(
    name="optigpu",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS: tuple[Callable[..., None], ...] = (
    local.probe, local.techniques, local.run, local.ladder, local.ablation, local.search, local.bench,
    local.selftest, runs.runs, runs.show, runs.export, runs.import_, remote.submit, remote.watch, remote.jobs,
    remote.cancel, remote.withdraw, remote.leaderboard, runs.compare, runs.replay, advise.claims,
    runs.chart, runs.charts, models.convert, models.recipe, advise.fit, advise.advise,
    local.batch_scaling,
)  # fmt: skip
FLAGGED = {
    local.run: job_panels,
    local.ladder: ladder_panels,
    local.ablation: ladder_panels,
    local.search: ladder_panels,
    remote.submit: job_panels,
    remote.leaderboard: query_panels,
    models.recipe: recipe_panels,
    runs.replay: replay_panels,
}
"""The commands with flags of the fields of a job or of a query."""
for command in COMMANDS:
    if command in FLAGGED:
        add_flagged(app, command, FLAGGED[command])
    else:
        app.command(command.__name__.rstrip("_").replace("_", "-"))(command)
for command in (gate.gate, gate.bisect):
    app.command(command.__name__, cls=gate.GateCommand)(command)
app.add_typer(local.engines_app, name="engines")
app.add_typer(models.app, name="models")


def _show_version(asked: bool) -> None:
    if asked:
        echo(f"optigpu {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """What each optimization layer buys on your hardware, alone and stacked."""


def bench_main() -> None:
    """The entry point of `optigpu-bench`, a short name for `optigpu bench`."""
    main(["bench", *sys.argv[1:]])


def main(arguments: list[str] | None = None) -> None:
    """The entry point; EXIT_STATUS says how it ends."""
    with checked_stderr():
        try:
            with checked_stdout():
                app(arguments)
        except OptiGPUError as error:
            echo(f"Error: {error}", err=True)
            given = sys.argv[1:] if arguments is None else arguments
            if given[:1] in (["gate"], ["bisect"]):
                sys.exit(gate.ERROR)
            refused = isinstance(error, ServiceError) and error.status in (400, 422)
            sys.exit(2 if refused or isinstance(error, SpecError) else 1)
