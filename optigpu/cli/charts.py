"""A command that draws: chart."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from optigpu.vocabulary import SpecError


class Kind(StrEnum):
    """The charts."""

    LADDER = "ladder"
    ROOFLINE = "roofline"
    QUALITY = "quality"
    THROUGHPUT = "throughput"


def add_commands(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(chart)


def chart(
    results: Annotated[
        Path,
        typer.Argument(metavar="RESULTS.JSON", help="What `optigpu run --json` or `ladder --json` printed."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .svg or .png.")],
    kind: Annotated[Kind, typer.Option(help="Which chart to draw.")] = Kind.LADDER,
) -> None:
    """Draw results: each variant's speed, its place under the roofline, speed against quality or against latency."""
    from optigpu.report import job_title
    from optigpu.report.charts import CHARTS

    document = _read(results)
    CHARTS[kind](job_title(document["spec"], document["results"]), document["results"], output)
    typer.echo(str(output))


def _read(path: Path) -> dict[str, Any]:
    """The results in a file. Raises SpecError when it cannot be read or holds something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}.") from error
    if not _is_report(document):
        raise SpecError(f"{path} holds no results; give a file that `optigpu run --json` wrote.")
    return dict(document)


def _is_report(document: Any) -> bool:
    """Whether it has the parts that a chart reads."""
    if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
        return False
    results = document.get("results")
    parts = {"variant", "verdict", "metrics", "environment"}
    return isinstance(results, list) and all(
        isinstance(each, dict) and parts <= set(each) for each in results
    )
