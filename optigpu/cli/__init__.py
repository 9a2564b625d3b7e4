"""The `optigpu` command. Commands import what they need when they run, so that `--help` is fast."""

import sys
from typing import Annotated

import typer

from optigpu import __version__
from optigpu.cli import (
    advise,
    batch_scaling,
    bench,
    charts,
    claims,
    compare,
    convert,
    engines,
    fit,
    leaderboard,
    local,
    recipe,
    remote,
    runs,
    selftest,
    tiny,
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
local.add_commands(app)
bench.add_commands(app)
selftest.add_commands(app)
runs.add_commands(app)
remote.add_commands(app)
leaderboard.add_commands(app)
compare.add_commands(app)
claims.add_commands(app)
charts.add_commands(app)
tiny.add_commands(app)
convert.add_commands(app)
recipe.add_commands(app)
engines.add_commands(app)
fit.add_commands(app)
advise.add_commands(app)
batch_scaling.add_commands(app)


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
            sys.exit(2 if _is_wrong_request(error) else 1)


def _is_wrong_request(error: OptiGPUError) -> bool:
    return isinstance(error, SpecError) or (isinstance(error, ServiceError) and error.status in (400, 422))
