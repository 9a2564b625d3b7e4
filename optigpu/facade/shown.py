"""How the facade's objects show themselves: tables on a terminal and in a notebook, data frames, pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group

from optigpu.documents.fields import require_known
from optigpu.report.charts import CHARTS, Report
from optigpu.report.charts.svg.picture import picture, write_picture
from optigpu.report.formats import Grid, console, html, terminal
from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    from pandas import DataFrame


class Shown:
    """The base of what is shown as tables: rich prints it, and a notebook displays it."""

    def grids(self) -> Sequence[Grid]:
        raise NotImplementedError

    def __rich__(self) -> Group:
        return Group(*map(terminal, self.grids()))

    def __str__(self) -> str:
        page = console()
        with page.capture() as captured:
            page.print(self)
        return captured.get().rstrip("\n")

    def _repr_html_(self) -> str:
        return "".join(map(html, self.grids()))


def frame(records: Sequence[Mapping[str, object]]) -> "DataFrame":
    """The records as a pandas DataFrame, one row each. Raises UnsupportedError where pandas is not installed."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise UnsupportedError("A data frame needs pandas; install it with `pip install pandas`.") from None
    return DataFrame.from_records(list(records))


@dataclass(frozen=True)
class Picture:
    """A chart that was drawn, as SVG; `path` is the file that was asked for, None for a picture in memory alone."""

    svg: str
    path: Path | None = None

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({self.path or f'{len(self.svg):,} characters of SVG'})"


def drawn(kind: str, report: Report, path: str | Path | None = None) -> Picture:
    """A chart of a report, also written to `path`, whose suffix (.svg, .png) chooses the format. Raises SpecError for
    an unknown kind, and where the results have nothing that such a chart shows."""
    require_known(kind, CHARTS, f"There is no chart {kind!r}", "The charts are")
    data, file = CHARTS[kind](report), None if path is None else Path(path)
    if file is not None:
        write_picture(data, file)
    return Picture(picture(data), file)
