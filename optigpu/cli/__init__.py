"""The `optigpu` command. Commands import what they need when they run, so that `--help` is fast."""

import sys

import typer

from optigpu.cli import charts, claims, compare, leaderboard, local, remote, runs
from optigpu.vocabulary import OptiGPUError, ServiceError, SpecError

app = typer.Typer(
    name="optigpu",
    help="What each optimization layer buys on your hardware, alone and stacked.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
local.add_commands(app)
runs.add_commands(app)
remote.add_commands(app)
leaderboard.add_commands(app)
compare.add_commands(app)
claims.add_commands(app)
charts.add_commands(app)


def main() -> None:
    """The entry point. Exit status: 0 done, 1 failed, 2 wrong request, 130 interrupted."""
    try:
        app()
    except OptiGPUError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2 if _is_wrong_request(error) else 1)


def _is_wrong_request(error: OptiGPUError) -> bool:
    return isinstance(error, SpecError) or (isinstance(error, ServiceError) and error.status in (400, 422))
