"""Prints tables and JSON on stdout, in the form that `--format` names."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.vocabulary import Document

if TYPE_CHECKING:
    from optigpu.documents.result import Attribution
    from optigpu.report import Grid

NOTHING_RANKED = 3
"""The exit status of a command whose job was measured, and none of its results can be ranked."""


class OutputFormat(StrEnum):
    TABLE = "table"
    MARKDOWN = "md"
    CSV = "csv"
    LATEX = "tex"
    JSON = "json"


FormatOption = Annotated[OutputFormat, typer.Option("--format", help="The form of the output.")]

JsonToo = Annotated[bool, typer.Option("--json", hidden=True)]
"""What other programs call `--format json`; the help names one of the two."""


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


def end_unranked(results: Sequence[Document], said: str | None = None) -> None:
    """Ends the command with status NOTHING_RANKED if none of a job's results can be ranked.

    It says why on stderr, unless the job's own reason has `said` it.
    """
    from optigpu.documents.ranking import why_none_ranks

    why = why_none_ranks(results)
    if why is None:
        return
    if why not in (said or ""):
        typer.echo(why, err=True)
    raise typer.Exit(NOTHING_RANKED)


def show_list(grid: "Grid", records: Sequence[Document], document: object, form: OutputFormat) -> None:
    """Prints a list: `grid` as a table, `records` as the lines of a CSV file, or `document` as JSON."""
    from optigpu.report import csv_text

    if form is OutputFormat.JSON:
        typer.echo(json.dumps(document, indent=2))
    elif form is OutputFormat.CSV:
        flat = [{name: _cell(value) for name, value in record.items()} for record in records]
        typer.echo(csv_text(list(flat[0]) if flat else [], flat), nl=False)
    else:
        show_grid(grid, form)


def _cell(value: object) -> object:
    """A value for CSV: words of a list behind each other, anything deeper as JSON."""
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, list | dict) else value


def show_grid(grid: "Grid", form: OutputFormat) -> None:
    """Prints a table for a terminal, as Markdown or for LaTeX."""
    from optigpu.report import console, latex, markdown, terminal

    if form is OutputFormat.MARKDOWN:
        typer.echo(markdown(grid), nl=False)
    elif form is OutputFormat.LATEX:
        typer.echo(latex(grid), nl=False)
    else:
        console().print(terminal(grid))
