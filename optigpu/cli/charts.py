"""The command `chart`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from optigpu.cli.remote import ApiKey, Url
from optigpu.cli.runs import find_run
from optigpu.variables import DEFAULT_URL


class Kind(StrEnum):
    LADDER = "ladder"
    ROOFLINE = "roofline"
    QUALITY = "quality"
    THROUGHPUT = "throughput"


def add_commands(app: typer.Typer) -> None:
    app.command()(chart)


def chart(
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help='What to draw in one chart: ids of kept runs or their ends, "last", files, or jobs of a service.',
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .svg, .png or .pdf.")],
    kind: Annotated[Kind, typer.Option(help="Which chart to draw.")] = Kind.LADDER,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Draw results: each variant's speed, its place under the roofline, speed against quality or against latency."""
    from optigpu.report.charts import CHARTS
    from optigpu.report.combined import combined

    title, results = combined([find_run(name, url, api_key).document for name in which])
    CHARTS[kind](title, results, output)
    typer.echo(str(output))
