"""One table, many forms: terminal and Markdown show the same cells; CSV holds the raw figures."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """A column's heading; `right` aligns figures."""

    heading: str
    right: bool = False


@dataclass(frozen=True)
class Grid:
    """A table as text: one cell for each column in each row.

    `faint` are the rows that do not count; `notes` stand below and say what a cell cannot.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    faint: frozenset[int] = frozenset()

    def without_empty_columns(self) -> "Grid":
        """A copy that keeps only the columns in which at least one cell has text."""
        kept = [n for n in range(len(self.columns)) if any(row[n] for row in self.rows)]
        columns = tuple(self.columns[n] for n in kept)
        rows = tuple(tuple(row[n] for n in kept) for row in self.rows)
        return Grid(self.title, columns, rows, self.notes, self.faint)


def terminal(grid: Grid) -> ConsoleRenderable:
    """The table for a terminal, its notes below."""
    table = Table(header_style="bold")
    for column in grid.columns:
        table.add_column(
            Text(column.heading),
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold",
        )
    for number, row in enumerate(grid.rows):
        table.add_row(*map(Text, row), style="dim" if number in grid.faint else None)
    return Group(Text(grid.title, style="bold"), table, *(Text(note, style="dim") for note in grid.notes))


def markdown(grid: Grid) -> str:
    """The table as GitHub's Markdown, its notes as a list below."""
    lines = [f"**{grid.title}**", ""] if grid.title else []
    lines.append(_bar(column.heading for column in grid.columns))
    lines.append(_bar("---:" if column.right else "---" for column in grid.columns))
    lines += [_bar(row) for row in grid.rows]
    if grid.notes:
        lines += ["", *(f"- {_one_line(note)}" for note in grid.notes)]
    return "\n".join(lines) + "\n"


def _bar(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_one_line(cell) for cell in cells) + " |"


def _one_line(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;")


def csv_text(fields: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV with a heading line; a null is an empty cell, and no text is a spreadsheet's formula."""
    page = io.StringIO()
    writer = csv.DictWriter(page, fieldnames=fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _inert(value) for name, value in record.items()} for record in records)
    return page.getvalue()


def _inert(value: Any) -> Any:
    """A text that a spreadsheet would run gets an apostrophe in front, which makes it a text again."""
    runs = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if runs else value


def console(*, stderr: bool = False) -> Console:
    """A console; where the output is no terminal, wide enough that no table breaks."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 140
    return made
