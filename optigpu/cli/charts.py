"""The command `chart`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeGuard

import typer

from optigpu.documents.files import read_json
from optigpu.vocabulary import Document, SpecError


class Kind(StrEnum):
    LADDER = "ladder"
    ROOFLINE = "roofline"
    QUALITY = "quality"
    THROUGHPUT = "throughput"


def add_commands(app: typer.Typer) -> None:
    app.command()(chart)


def chart(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS.JSON", help="A file that `optigpu run --json` or `optigpu ladder --json` wrote."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .svg, .png or .pdf.")],
    kind: Annotated[Kind, typer.Option(help="Which chart to draw.")] = Kind.LADDER,
) -> None:
    """Draw results: each variant's speed, its place under the roofline, speed against quality or against latency."""
    from optigpu.report import job_title
    from optigpu.report.charts import CHARTS

    document = _read(results)
    CHARTS[kind](job_title(document["spec"], document["results"]), document["results"], output)
    typer.echo(str(output))


def _read(path: Path) -> Document:
    """The results in a file. Raises SpecError if it cannot be read or holds something else."""
    document = read_json(path)
    if not _is_report(document):
        raise SpecError(f"{path} holds no results; give a file that `optigpu run --json` wrote.")
    return document


def _is_report(document: object) -> TypeGuard[Document]:
    """Whether the document has the parts that charts read."""
    if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
        return False
    results = document.get("results")
    parts = {"variant", "verdict", "metrics", "environment"}
    return isinstance(results, list) and all(
        isinstance(each, dict) and parts <= set(each) for each in results
    )
