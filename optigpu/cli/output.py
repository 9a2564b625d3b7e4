"""Prints tables and JSON on stdout."""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.vocabulary import Document

if TYPE_CHECKING:
    from optigpu.documents.result import Attribution
    from optigpu.report import Grid


class OutputFormat(StrEnum):
    TABLE = "table"
    MARKDOWN = "md"
    CSV = "csv"
    LATEX = "tex"
    JSON = "json"


FormatOption = Annotated[OutputFormat, typer.Option("--format", help="The form of the output.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]


def show_job(document: Document, attribution: "Attribution", form: OutputFormat) -> None:
    """Prints a job's results: `document` is {"spec", "results", "attribution"}."""
    from optigpu.report import job_title, ladder_csv, ladder_grid

    results = document["results"]
    if form is OutputFormat.JSON:
        typer.echo(json.dumps(document, indent=2))
    elif form is OutputFormat.CSV:
        typer.echo(ladder_csv(attribution, results), nl=False)
    else:
        show_grid(ladder_grid(job_title(document["spec"], results), attribution, results), form)


def show_grid(grid: "Grid", form: OutputFormat) -> None:
    """Prints a table for a terminal, as Markdown or for LaTeX."""
    from optigpu.report import console, latex, markdown, terminal

    if form is OutputFormat.MARKDOWN:
        typer.echo(markdown(grid), nl=False)
    elif form is OutputFormat.LATEX:
        typer.echo(latex(grid), nl=False)
    else:
        console().print(terminal(grid))
