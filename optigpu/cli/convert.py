"""The commands `convert`, a network as INT8 TensorFlow Lite (which boards hold it, `fit` shows), and `tiny`, which
drives a device over a serial line by MLPerf Tiny's protocol."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optigpu.cli.flags import DURATION, SIZE, read_quantity
from optigpu.cli.measuring import ended_when_stopped
from optigpu.cli.output import NOTHING_RANKED, FormatOption, OutputFormat, echo, show_grid, show_list
from optigpu.vocabulary import SpecError

if TYPE_CHECKING:
    from optigpu.edge.convert import Data, MobileNet, NetworkFile
    from optigpu.edge.tiny.session import Rules, Session, TinyAccuracy, TinyPerformance
    from optigpu.report import Grid


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
    from optigpu.report import console
    from optigpu.report.fit import board_grid, board_records, conversion_progress, manifest_grid

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
        conversion_progress(console(stderr=True)) as doing,
    ):
        converted = run(request, doing, stop)
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


def tiny(
    port: Annotated[
        str,
        typer.Option(
            metavar="DEVICE", help="The serial port, /dev/ttyUSB0 for example, or a pseudo-terminal."
        ),
    ],
    mode: Annotated[
        Literal["performance", "accuracy"],
        typer.Option(help="How fast the device is, or how well it answers."),
    ] = "performance",
    inputs: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A .npz with inputs and labels, or a folder with y_labels.csv. Performance needs none.",
        ),
    ] = None,
    model_profile: Annotated[
        str | None,
        typer.Option(
            "--model-profile", help="ic01, vww01, kws01 or ad01. Default: what the device says it is."
        ),
    ] = None,
    baud: Annotated[int, typer.Option(help="Bits per second of the port.")] = 115_200,
    seconds: Annotated[float, typer.Option(min=0.01, help="Performance: least time of a run.")] = 10.0,
    inferences: Annotated[int, typer.Option(min=1, help="Performance: least inferences of a run.")] = 10,
    runs: Annotated[int, typer.Option(min=1, max=100, help="Performance: how many runs.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="Accuracy: only the first samples.")] = None,
    silence: Annotated[
        float,
        typer.Option(min=0.05, help="So many seconds without an answer are an error; in infer six times."),
    ] = 5.0,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Drive a device over a serial line by MLPerf Tiny's protocol, as its open runner does.

    Exit status 3 if the accuracy is below the target of the profile.
    """
    from optigpu.edge.tiny.session import Rules, open_session

    if mode == "accuracy" and inputs is None:
        raise SpecError("--mode accuracy needs --inputs: a .npz with inputs and labels, or a folder.")
    with open_session(port, baud, silence, model_profile) as session:
        if mode == "performance":
            _performance(session, inputs, Rules(seconds, inferences, runs), format_)
        elif inputs is not None:
            _accuracy(session, inputs, limit, format_)


def _performance(session: "Session", inputs: Path | None, rules: "Rules", form: OutputFormat) -> None:
    from optigpu.edge.tiny.profiles import read_samples
    from optigpu.edge.tiny.session import measure_performance

    sample = read_samples(inputs, session.profile, 1)[0] if inputs else None
    done = 0

    def say(_: object) -> None:
        nonlocal done
        done += 1
        echo(f"run {done} of {rules.runs}", err=True)

    found = measure_performance(session, sample, rules, say)
    document = found.model_dump(mode="json")
    show_list(performance_grid(found), document["runs"], document, form)


def _accuracy(session: "Session", inputs: Path, limit: int | None, form: OutputFormat) -> None:
    from rich.progress import Progress

    from optigpu.edge.tiny.profiles import labels_of, read_samples
    from optigpu.edge.tiny.session import measure_accuracy
    from optigpu.report import console

    samples = read_samples(inputs, session.profile, limit)
    labels = labels_of(samples, inputs)
    screen = console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("samples", total=len(samples))
        found = measure_accuracy(
            session, samples, labels, lambda number: progress.update(task, completed=number)
        )
    document = found.model_dump(mode="json")
    record = {name: value for name, value in document.items() if name != "device"}
    show_list(accuracy_grid(found), [record], document, form)
    if not found.reached:
        raise typer.Exit(NOTHING_RANKED)


def performance_grid(found: "TinyPerformance") -> "Grid":
    """A row for each timed run, the median below."""
    notes = [f"Median: {found.inferences_per_s:.3f} inferences/s, {found.latency_us:.0f} us each."]
    if not found.clock_agrees:
        notes.append("The device's clock and the host's differ: its times are not to be believed.")
    rows = [
        (
            str(number),
            str(run.inferences),
            *(f"{each:.3f}" for each in (run.elapsed_s, run.host_s, run.per_second)),
        )
        for number, run in enumerate(found.runs, 1)
    ]
    return _grid(found, ("run", "inferences:", "device (s):", "host (s):", "inferences/s:"), rows, notes)


def accuracy_grid(found: "TinyAccuracy") -> "Grid":
    """One row: what was reached of what the profile asks for."""
    row = (str(found.samples), f"{found.value:.4f}", f"{found.target:.2f}", "yes" if found.reached else "no")
    return _grid(found, ("samples:", f"{found.metric}:", "target:", "reached"), [row])


def _grid(
    found: "TinyPerformance | TinyAccuracy",
    headings: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    notes: Sequence[str] = (),
) -> "Grid":
    from optigpu.report.formats import Grid, columns

    device, count = found.device, found.noise_lines
    noise = (f"{count} lines of noise came from the device and were left out.",) if count else ()
    title = f"MLPerf Tiny's {device.profile}, {found.mode}, on {device.name} at {device.port}"
    return Grid(title, columns(*headings), tuple(rows), (*notes, *noise))
