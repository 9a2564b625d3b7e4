"""The command `recipe`: a smaller model of a trained one, and how it compares with it."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flags import DURATION, read_quantity
from optigpu.cli.measuring import default_device, measure, show, stoppable
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_grid
from optigpu.vocabulary import CancelledError, RecipeName

if TYPE_CHECKING:
    from optigpu.recipes.request import RecipeOutcome, RecipeRequest

Name = Annotated[
    RecipeName, typer.Argument(metavar="NAME", help="distillation (fewer layers) or structured_pruning.")
]
Model = Annotated[str, typer.Option(help="The trained model to begin with.")]
Output = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where the smaller model goes. Default: the recipe's name."),
]
Layers = Annotated[
    int | None, typer.Option(help="distillation: the layers that stay. Default: half of them.", min=1)
]
Keep = Annotated[float, typer.Option(help="structured_pruning: the share of each MLP's neurons that stays.")]
Steps = Annotated[int, typer.Option(help="Steps of training.", min=0)]
BatchSize = Annotated[int, typer.Option(help="Texts of a step.", min=1)]
Length = Annotated[int, typer.Option(help="Tokens of a text.", min=8)]
Texts = Annotated[int, typer.Option(help="How many texts the model writes to learn from.", min=1)]
Rate = Annotated[float, typer.Option("--learning-rate", help="The highest learning rate.")]
Seed = Annotated[int, typer.Option(help="What texts are drawn with.", min=0)]
Replicates = Annotated[
    int, typer.Option(help="Processes of each model in the comparison; 0 leaves it out.", min=0, max=50)
]
Timeout = Annotated[str, typer.Option(metavar="TIME", help="The most time that training may take.")]


def add_commands(app: typer.Typer) -> None:
    app.command()(recipe)


def recipe(
    name: Name,
    model: Model = "bundled:tiny",
    output: Output = None,
    layers: Layers = None,
    keep: Keep = 0.5,
    steps: Steps = 120,
    batch_size: BatchSize = 8,
    length: Length = 128,
    texts: Texts = 256,
    learning_rate: Rate = 1e-3,
    seed: Seed = 0,
    replicates: Replicates = 3,
    timeout: Timeout = "30m",
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Make a smaller model of a trained one, and measure its quality and its speed beside it.

    It learns from text that the larger model writes, so no data are needed.
    """
    from optigpu.documents.fields import refusing
    from optigpu.recipes.request import RecipeRequest

    with refusing(RecipeRequest):
        request = RecipeRequest(
            recipe=name,
            model=model,
            output=output or Path(name),
            layers=layers,
            keep=keep,
            steps=steps,
            batch_size=batch_size,
            length=length,
            texts=texts,
            learning_rate=learning_rate,
            seed=seed,
        )
    outcome = _made(request, read_quantity(timeout, DURATION, "timeout"))
    if format_ is not OutputFormat.JSON or not replicates:
        _show(outcome, format_)
    if replicates:
        _compare(outcome, replicates, format_)


def _made(request: "RecipeRequest", limit_s: float) -> "RecipeOutcome":
    from optigpu.conductor.recipe import make_smaller
    from optigpu.report import console
    from optigpu.report.edge import ConversionProgress

    with stoppable() as stop, ConversionProgress(console(stderr=True)) as progress:
        try:
            return make_smaller(request, progress.doing, stop, limit_s)
        except CancelledError:
            echo("The recipe was stopped, and nothing was written.", err=True)
            raise typer.Exit(stop.status) from None


def _show(outcome: "RecipeOutcome", form: OutputFormat) -> None:
    from optigpu.report.tables import recipe_grid

    if form is OutputFormat.JSON:
        echo(json.dumps(outcome.model_dump(mode="json"), indent=2))
        return
    show_grid(recipe_grid(outcome), OutputFormat.TABLE if form is OutputFormat.CSV else form)


def _compare(outcome: "RecipeOutcome", replicates: int, form: OutputFormat) -> None:
    """The normal job, in which both models take turns."""
    from optigpu.models.held import MODELS_DIR
    from optigpu.recipes.request import comparison_of

    os.environ[MODELS_DIR] = str(outcome.request.output.parent)
    measured = measure(comparison_of(outcome, default_device(), replicates))
    show(measured, form)
    if measured.status:
        raise typer.Exit(measured.status)
