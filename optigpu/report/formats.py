"""Numbers as text, a missing one as "-"; and tables in several forms: the terminal, Markdown, HTML and LaTeX show the
same cells, CSV holds the raw values."""

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from optigpu.documents.result import Gain, Payback
from optigpu.vocabulary import Document, harmless

MISSING = "-"
NOT_VALID = " !"
"""Follows a figure or a ratio that is not valid."""
LOPSIDED = 4 / 3
"""An interval is written by its bounds where one side is more than so many times the other: ± would hide it."""


def short(number: float | None) -> str:
    """At most four significant digits, without an exponent for numbers of usual size."""
    if number is None:
        return MISSING
    magnitude = abs(number)
    if magnitude >= 1000:
        return f"{number:,.0f}"
    if magnitude >= 100:
        return f"{number:.0f}"
    if magnitude >= 10:
        return f"{number:.1f}"
    return f"{number:.3g}" if magnitude < 1 else f"{number:.2f}"


def with_error(value: float, interval: Sequence[float] | None) -> str:
    """`602 ±7%`: with the longer side of the 95% interval, where there is one."""
    if not (interval and value):
        return short(value)
    return f"{short(value)} ±{max(abs(bound - value) for bound in interval) / value:.0%}"


def interval(ci: Sequence[float] | None) -> str:
    """`[41.0, 47.3]`; blank where there is none."""
    return "" if ci is None else f"[{short(ci[0])}, {short(ci[1])}]"


def with_interval(metric: Document | None, scale: float = 1.0) -> str:
    """`42.1 ±1.5`, with the longer side of the 95% interval, or `42.1 [41.0, 47.3]` where its sides differ by more than
    a third. `metric` is a summary as JSON."""
    if not metric or metric.get("value") is None:
        return MISSING
    value = metric["value"] * scale
    if not metric.get("ci"):
        return short(value)
    low, high = (bound * scale for bound in metric["ci"])
    shorter, longer = sorted((value - low, high - value))
    if longer > LOPSIDED * shorter:
        _, _, shown = short(value).partition(".")
        decimals = max(
            len(shown), math.ceil(math.log10(4 / longer))
        )  # as the value, or what shows the longer side
        return f"{short(value)} [{low:,.{decimals}f}, {high:,.{decimals}f}]"
    return f"{short(value)} ±{longer:.2g}" if longer < 100 else f"{short(value)} ±{short(longer)}"


def scaled(metric: Document | None, scale: float) -> str:
    """The value alone, in another unit."""
    return MISSING if not metric or metric.get("value") is None else short(metric["value"] * scale)


def ratio(gain: Gain | None) -> str:
    """`1.23x [1.20, 1.26]`: a ratio with its 95% interval, marked if it is not valid."""
    if gain is None:
        return MISSING
    interval = f" [{gain.ci[0]:.2f}, {gain.ci[1]:.2f}]" if gain.ci else ""
    return f"{gain.ratio:.2f}x{interval}{'' if gain.valid else NOT_VALID}"


def payback(found: Payback | None) -> str:
    """`120 [100, 150]`: steps with their 95% interval, or "never"; blank where nothing was compiled."""
    if found is None:
        return ""
    if found.steps is None:
        return "never"
    interval = f" [{short(found.ci[0])}, {short(found.ci[1])}]" if found.ci else ""
    return f"{short(found.steps)}{interval}"


def duration(seconds: float) -> str:
    """Whole seconds as `m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PREFIXED_FROM = 10_000
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def prefixed(numbers: Sequence[float], step: float) -> list[str]:
    """Numbers of an axis `step` apart, with as many decimals as that needs and one SI prefix: `0`, `20k`, `40k`."""
    largest = max(map(abs, numbers), default=0.0)
    if largest >= 1e16 or (step and step < 1e-6):
        return ["0" if number == 0 else f"{number:.6g}" for number in numbers]
    prefixes = _PREFIXES if largest >= _PREFIXED_FROM else ()
    unit, letter = next(((size, each) for size, each in prefixes if largest >= size), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9)) if step else 2
    return ["0" if number == 0 else f"{number / unit:,.{decimals}f}{letter}" for number in numbers]


def superscript(number: float) -> str:
    """A number of a logarithmic axis: `0.5`, `200`, `20k`, `2·10⁻⁶`."""
    power = math.floor(math.log10(number) + 1e-9)
    if -3 <= power < 4:
        return f"{number:g}" if number < 1000 else f"{number:,.0f}"
    if 4 <= power < 15:
        unit, letter = next((size, each) for size, each in _PREFIXES if number >= size * (1 - 1e-9))
        return f"{number / unit:.4g}{letter}"
    factor = number / 10.0**power
    times = "" if f"{factor:.3g}" == "1" else f"{factor:.3g}·"
    return f"{times}10{str(power).translate(_SUPERSCRIPTS)}"


TEXT_WIDTH = 23
"""Characters of the longest name of a technique with a space and a plus after it."""
WORD_WIDTH = 36
"""Characters of an id. Words that are longer are broken: two columns of such words fit 80."""
FRAME = 3
"""Characters that a column takes beside its cells: a line, and a space on each side."""


@dataclass(frozen=True)
class Column:
    """A column's heading; `right` aligns figures."""

    heading: str
    right: bool = False


def columns(*headings: str) -> tuple[Column, ...]:
    """Columns by their headings; a colon behind one, as in Markdown, is for figures, which are aligned right."""
    return tuple(Column(heading.removesuffix(":"), heading.endswith(":")) for heading in headings)


@dataclass(frozen=True)
class Grid:
    """A table as text: one cell for each column in each row. `faint` are the rows that are not ranked; `notes` are
    shown below the table."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    faint: frozenset[int] = frozenset()

    def without_empty_columns(self) -> "Grid":
        """A copy that keeps only the columns in which at least one cell has text; of a table without rows, all."""
        if not self.rows:
            return self
        kept = [n for n in range(len(self.columns)) if any(row[n] for row in self.rows)]
        columns = tuple(self.columns[n] for n in kept)
        rows = tuple(tuple(row[n] for n in kept) for row in self.rows)
        return Grid(self.title, columns, rows, self.notes, self.faint)


Item = TypeVar("Item")


def tabulated(
    title: str,
    items: Sequence[Item],
    cells: Mapping[str, Callable[[Item], str]],
    notes: Sequence[str] = (),
    *,
    faint: Callable[[Item], bool] = lambda _: False,
) -> Grid:
    """A row for each item; `cells` are what stands in it under each heading, which is written as for `columns`."""
    rows = tuple(tuple(cell(each) for cell in cells.values()) for each in items)
    pale = frozenset(number for number, each in enumerate(items) if faint(each))
    return Grid(title, columns(*cells), rows, tuple(notes), pale)


def terminal(grid: Grid) -> ConsoleRenderable:
    """The table for a terminal, with its notes below. A table wider than the terminal is split into several."""
    return Group(
        Text(grid.title, style="bold"), _Tables(grid), *(Text(note, style="dim") for note in grid.notes)
    )


class _Tables:
    """The columns of a grid in as few tables as fit the width, each with the first column."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._least, self._whole = [], []
        for number, column in enumerate(grid.columns):
            texts = (column.heading, *(row[number] for row in grid.rows))
            self._least.append(least_width(column, texts, leads=number == 0))
            self._whole.append(max(map(cell_len, texts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A column too wide even beside the first alone is cut by the terminal."""
        portion = [0]
        for number in range(1, len(self._least)):
            if len(portion) > 1 and self._spare([*portion, number], options.max_width) < 0:
                yield self._table(portion, options.max_width)
                portion = [0]
            portion.append(number)
        yield self._table(portion, options.max_width)

    def _spare(self, numbers: Sequence[int], room: int) -> int:
        """What is left of the width where each column has its least."""
        return room - 1 - sum(self._least[n] + FRAME for n in numbers)

    def _table(self, numbers: Sequence[int], room: int) -> Table:
        """What is left of the width goes to the columns in equal parts, first to those that lack least."""
        widths, spare = {}, max(0, self._spare(numbers, room))
        lacking = sorted(numbers, key=lambda n: self._whole[n] - self._least[n])
        for place, number in enumerate(lacking):
            widths[number] = min(self._whole[number], self._least[number] + spare // (len(lacking) - place))
            spare -= widths[number] - self._least[number]
        table = Table(header_style="bold")
        for number in numbers:
            column = self._grid.columns[number]
            table.add_column(
                Text(column.heading),
                justify="right" if column.right else "left",
                no_wrap=column.right,
                overflow="fold",
                width=widths[number],
            )
        for number, row in enumerate(self._grid.rows):
            cells = (Text(_foldable(row[n], widths[n])) for n in numbers)
            table.add_row(*cells, style="dim" if number in self._grid.faint else None)
        return table


def least_width(column: Column, texts: Sequence[str], *, leads: bool) -> int:
    """The smallest readable width of a column: whole numbers, whole words, labels in a few lines."""
    longest = max(map(cell_len, texts), default=1)
    if column.right:
        return longest
    words = (word for text in texts for word in _foldable(text, 0).split())
    return max(
        min(longest, TEXT_WIDTH) if leads else 1, min(max(map(cell_len, words), default=1), WORD_WIDTH)
    )


def _foldable(cell: str, width: int) -> str:
    """A word that is wider than this is broken behind its last slash."""
    words = (word if cell_len(word) <= width else "/\n".join(word.rsplit("/", 1)) for word in cell.split(" "))
    return " ".join(words)


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


def html(grid: Grid) -> str:
    """The table for a notebook or a page: a caption, the rows that are not ranked in grey, the notes below."""
    head = "".join(_cell("th", column, column.heading) for column in grid.columns)
    rows = "".join(
        ('<tr style="color: #777">' if number in grid.faint else "<tr>")
        + "".join(_cell("td", column, text) for column, text in zip(grid.columns, row, strict=True))
        + "</tr>"
        for number, row in enumerate(grid.rows)
    )
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in grid.notes)
    caption = f"<caption><b>{escape(grid.title)}</b></caption>" if grid.title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}"


def _cell(tag: str, column: Column, text: str) -> str:
    return f'<{tag} style="text-align: {"right" if column.right else "left"}">{escape(text)}</{tag}>'


def latex(grid: Grid) -> str:
    """The table for LaTeX with the package booktabs: a float with a caption, its notes below."""
    rows = (" & ".join(map(_escaped, row)) + r" \\" for row in grid.rows)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_escaped(grid.title)}}}",
        rf"  \begin{{tabular}}{{{''.join('r' if column.right else 'l' for column in grid.columns)}}}",
        r"    \toprule",
        "    " + " & ".join(_escaped(column.heading) for column in grid.columns) + r" \\",
        r"    \midrule",
        *(f"    {row}" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        *(rf"  \par\footnotesize {_escaped(note)}" for note in grid.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
        **{each: rf"\{each}" for each in "&%$#_{}"},
    }
)  # fmt: skip


def _escaped(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)


def csv_text(fields: Sequence[str], records: Sequence[Mapping[str, object]]) -> str:
    """Records as CSV with a heading line. Null is an empty cell; no text is read as a formula by a spreadsheet."""
    page = io.StringIO()
    writer = csv.DictWriter(page, fieldnames=fields, lineterminator="\n")
    writer.writeheader()
    for record in records:
        texts = {name: harmless(value) for name, value in record.items() if isinstance(value, str)}
        inert = {
            name: f"'{text}" for name, text in texts.items() if text.startswith(("=", "+", "-", "@", "\t"))
        }
        writer.writerow({**record, **texts, **inert})
    return page.getvalue()


class _Harmless(Console):
    """Leaves out what texts hold beside characters; the control codes of rich itself stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def console(*, stderr: bool = False) -> Console:
    """A console; 140 columns wide if the output is not a terminal. What it shows cannot steer the terminal."""
    made = _Harmless(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 140
    return made
