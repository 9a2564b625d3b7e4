"""The command `tiny`: drives a device over a serial line by MLPerf Tiny's protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optigpu.cli.output import NOTHING_RANKED, FormatOption, OutputFormat, echo, show_list
from optigpu.vocabulary import SpecError

if TYPE_CHECKING:
    from optigpu.edge.tiny.session import Rules, Session, TinyAccuracy, TinyPerformance
    from optigpu.report import Grid


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
