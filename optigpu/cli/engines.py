"""The commands `engines list`, `engines install` and `engines remove`: engines with an environment of their own."""

from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.output import FormatOption, OutputFormat, echo, show_list
from optigpu.vocabulary import SpecError

if TYPE_CHECKING:
    from optigpu.engines.recipes import Recipe

Name = Annotated[str, typer.Argument(metavar="NAME", help="The engine's backend, as `engines list` has it.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="How many compilers run at once. Default: each core.")]


app = typer.Typer(no_args_is_help=True, help="Engines that have an environment of their own.")


@app.command("list")
def list_engines(format_: FormatOption = OutputFormat.TABLE) -> None:
    """List the engines that have an environment of their own, and whether it is there."""
    from optigpu.report.tables import engine_facts, engines_grid

    facts = engine_facts()
    show_list(engines_grid(facts), facts, facts, format_)


@app.command()
def install(name: Name, jobs: Jobs = None) -> None:
    """Make the environment of an engine under the cache folder. Jobs on its backend use it from then on."""
    from optigpu.engines.install import install as make
    from optigpu.hardware.cpu import cpu_cores

    recipe = _recipe(name)
    environment = make(recipe, lambda doing: echo(f"{name}: {doing}", err=True), jobs or cpu_cores())
    echo(f"{name} is installed in {environment.folder}.")


@app.command()
def remove(name: Name) -> None:
    """Remove the environment of an engine."""
    from optigpu.engines.install import remove as remove_environment

    was_there = remove_environment(_recipe(name))
    echo(f"{name} is removed." if was_there else f"{name} was not installed.")


def _recipe(name: str) -> "Recipe":
    from optigpu.engines.recipes import RECIPES

    if name not in RECIPES:
        raise SpecError(
            f"There is no environment to make for {name!r}; the engines that have one are {', '.join(RECIPES)}."
        )
    return RECIPES[name]
