"""Prints tables and JSON on stdout, in the form that `--format` names."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer

from optigpu.vocabulary import Document, OptiGPUError, harmless

if TYPE_CHECKING:
    from optigpu.documents.result import Attribution
    from optigpu.report.formats import Grid

NOTHING_RANKED = 3
"""The exit status of a command whose job was measured, and none of its results can be ranked."""


class OutputFormat(StrEnum):
    TABLE = "table"
    MARKDOWN = "md"
    CSV = "csv"
    LATEX = "tex"
    JSON = "json"


FormatOption = Annotated[OutputFormat, typer.Option("--format", help="The form of the output.")]

Verbose = Annotated[
    bool, typer.Option("--verbose", help="Print all columns and notes, as `optigpu show last` does.")
]


class _Checked:
    """A stream whose errors are OptiGPUErrors; where nobody needs to read it, they are passed over."""

    def __init__(self, stream: TextIO, *, needed: bool) -> None:
        self._stream, self._needed = stream, needed

    def write(self, text: str) -> int:
        with self._one_sentence():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._one_sentence():
            self._stream.flush()

    def drop(self) -> None:
        """Lets go of what could not be written: else the end of Python tries once more, and says so."""
        with suppress(OSError):  # it is in memory
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._needed:
                raise OptiGPUError(
                    f"The output cannot be written: {error.strerror}; name another place for it."
                ) from error


@contextmanager
def checked_stderr() -> Iterator[None]:
    """Within it an error of stderr says nothing: a job goes on without it."""
    with redirect_stderr(cast(TextIO, _Checked(sys.stderr, needed=False))):
        yield


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Within it an error of stdout is an OptiGPUError, at its end at the latest."""
    if sys.stdout is None:  # it was closed before the command began
        yield
        return
    checked = _Checked(sys.stdout, needed=True)
    with redirect_stdout(cast(TextIO, checked)):
        try:
            yield
        finally:
            try:
                checked.flush()
            except OptiGPUError:
                checked.drop()
                raise


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text, of which nothing steers the terminal, with a line end where `nl` says so."""
    typer.echo(harmless(text), err=err, nl=nl)


def present(
    form: OutputFormat, document: object, csv: Callable[[], str], grids: Callable[[], "Iterable[Grid]"]
) -> None:
    """Prints what a command has found: a `document` as JSON, the text of a CSV file, or tables."""
    if form is OutputFormat.JSON:
        echo(json.dumps(document, indent=2))
    elif form is OutputFormat.CSV:
        echo(csv(), nl=False)
    else:
        for grid in grids():
            show_grid(grid, form)


def show_job(
    document: Document, attribution: "Attribution", form: OutputFormat, *, brief: bool = False
) -> None:
    """Prints a job's results: `document` is {"spec", "results", "attribution"}. `brief` is of the table alone."""
    from optigpu.report.catalog import job_title
    from optigpu.report.ladder import brief_grid, ladder_csv, ladder_grid

    results = document["results"]
    grid_of = brief_grid if brief and form is OutputFormat.TABLE else ladder_grid
    present(
        form,
        document,
        lambda: ladder_csv(attribution, results),
        lambda: [grid_of(job_title(document["spec"], results), attribution, results)],
    )


def show_list(grid: "Grid", records: Sequence[Document], document: object, form: OutputFormat) -> None:
    """Prints a list: `grid` as a table, `records` as the lines of a CSV file, or `document` as JSON."""
    from optigpu.report.formats import csv_text

    def csv() -> str:
        flat = [{name: _cell(value) for name, value in record.items()} for record in records]
        return csv_text(list(flat[0]) if flat else [], flat)

    present(form, document, csv, lambda: [grid])


def _cell(value: object) -> object:
    """A value for CSV: words of a list behind each other, anything deeper as JSON."""
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, list | dict) else value


def show_grid(grid: "Grid", form: OutputFormat) -> None:
    """Prints a table for a terminal, as Markdown or for LaTeX."""
    from optigpu.report.formats import console, latex, markdown, terminal

    if form in (OutputFormat.MARKDOWN, OutputFormat.LATEX):
        echo(latex(grid) if form is OutputFormat.LATEX else markdown(grid), nl=False)
    else:
        console().print(terminal(grid))
