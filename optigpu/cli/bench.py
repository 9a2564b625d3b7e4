"""The command `bench`, also `optigpu-bench`: what this machine does, in a few minutes."""

import json
from typing import Annotated

import typer

from optigpu.cli.measuring import default_device, measure, show
from optigpu.cli.output import FormatOption, OutputFormat, echo
from optigpu.vocabulary import BenchMode, DeviceKind, Precision


def bench(
    mode: Annotated[
        BenchMode, typer.Option(help="quick takes about two minutes on two cores, full about five.")
    ] = BenchMode.QUICK,
    precision: Annotated[
        Precision, typer.Option(help="What the weights are stored as while the model decodes.")
    ] = Precision.INT4,
    model: Annotated[str, typer.Option(help="The model that decodes.")] = "preset:gpt2",
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure this machine: matrix products, attention, decoding, and one line to quote."""
    from optigpu.hardware import probe
    from optigpu.job.bench import bench_specs
    from optigpu.report.tables import bench_line

    specs = bench_specs(probe(), device or default_device(), mode, precision, model)
    measured = []
    for spec in specs:
        done = measure(spec)
        measured.append(done)
        if format_ is not OutputFormat.JSON:
            show(done, format_)
        if done.report.cancelled:
            break
    line = bench_line([(done.document["results"], done.report.attribution) for done in measured])
    document = {"summary": line, "runs": [done.document for done in measured]}
    echo(json.dumps(document, indent=2) if format_ is OutputFormat.JSON else line)
    for done in measured:
        done.end()
