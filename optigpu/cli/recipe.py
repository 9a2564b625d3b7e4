"""The command `recipe`: a smaller model of a trained one, and how it compares with it."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from optigpu.cli.flags import DURATION, read_quantity
from optigpu.cli.measuring import default_device, ended_when_stopped, measure_and_show
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_grid
from optigpu.vocabulary import RecipeName

Steps = Annotated[int, typer.Option(help="Steps of training.", min=0)]
Texts = Annotated[int, typer.Option(help="How many texts the model writes to learn from.", min=1)]


def recipe(
    name: Annotated[
        RecipeName, typer.Argument(metavar="NAME", help="distillation (fewer layers) or structured_pruning.")
    ],
    model: Annotated[str, typer.Option(help="The trained model to begin with.")] = "bundled:tiny",
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the smaller model goes. Default: the recipe's name."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="distillation: the layers that stay. Default: half of them.", min=1)
    ] = None,
    keep: Annotated[
        float, typer.Option(help="structured_pruning: the share of each MLP's neurons that stays.")
    ] = 0.5,
    steps: Steps = 120,
    batch_size: Annotated[int, typer.Option(help="Texts of a step.", min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a text.", min=8)] = 128,
    texts: Texts = 256,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="The highest learning rate.")
    ] = 1e-3,
    seed: Annotated[int, typer.Option(help="What texts are drawn with.", min=0)] = 0,
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
    from optigpu.conductor.tasks import make_smaller
    from optigpu.documents.fields import refusing
    from optigpu.models.held import MODELS_DIR
    from optigpu.recipes.request import RecipeRequest, comparison_of
    from optigpu.report import console
    from optigpu.report.edge import conversion_progress
    from optigpu.report.tables import recipe_grid

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
    with (
        ended_when_stopped("The recipe was stopped, and nothing was written.") as stop,
        conversion_progress(console(stderr=True)) as doing,
    ):
        outcome = make_smaller(request, doing, stop, read_quantity(timeout, DURATION, "timeout"))
    if format_ is OutputFormat.JSON and not replicates:
        echo(json.dumps(outcome.model_dump(mode="json"), indent=2))
    elif format_ is not OutputFormat.JSON:
        show_grid(recipe_grid(outcome), OutputFormat.TABLE if format_ is OutputFormat.CSV else format_)
    if replicates:  # the normal job, in which both models take turns
        os.environ[MODELS_DIR] = str(request.output.parent)
        measure_and_show(comparison_of(outcome, default_device(), replicates), format_)
