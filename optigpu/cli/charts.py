"""The commands `chart` and `charts`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from optigpu.cli.output import echo
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url
from optigpu.cli.runs import Which, find_run

Kind = Literal[
    "ladder", "roofline", "quality", "throughput", "precision", "overview", "lengths", "batches", "loads", "pareto",
    "bits", "waterfall", "comparison", "baselines", "architecture",
]  # fmt: skip


def chart(
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help='What to draw in one chart: ids of kept runs or their ends, "last", files, or jobs of a service.',
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .svg or .png.")],
    kind: Annotated[Kind, typer.Option(help="Which chart to draw.")] = "ladder",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Draw results: each variant's speed, its place under the roofline, speed against quality or against latency."""
    from optigpu.report.catalog import combined
    from optigpu.report.charts import CHARTS

    found = [find_run(name, url, api_key) for name in which]
    title, results = combined([run.document for run in found])
    CHARTS[kind](title, results, output, found[0].attribution if len(found) == 1 else None)
    echo(str(output))


def charts(
    which: Which,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to; it is made if needed.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Draw every chart that a run has the figures for, as SVG and PNG, with the data beside them as JSON."""
    from optigpu.report.catalog import combined
    from optigpu.report.charts import Report, write_charts

    run = find_run(which, url, api_key)
    title, results = combined([run.document])
    for each in write_charts(Report(title, results, run.attribution), out):
        for file in each.files:
            echo(str(file))
        if each.reason:
            echo(f"{each.name}: not drawn. {each.reason}", err=True)
