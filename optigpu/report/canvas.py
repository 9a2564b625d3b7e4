"""The common parts of all charts: style, markers, legend, and reproducible files."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from optigpu.vocabulary import Document, OptiGPUError, SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#6b6b6b"
RED = "#c1121f"
"""Of limits. All three are legible as text on white: a contrast of at least 4.5 (WCAG 2.2, 1.4.3)."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b4a9c", "#7f7f7f")
"""Distinguishable with colour blindness (Okabe and Ito, Color Universal Design, 2008)."""
MARKERS = "osD^vPX"
"""One fewer than the colours, so that a pair repeats only after 56 variants."""
HATCHES = ("", "....", "xxxx", "----", "++++")
"""Of bars, in the order of the colours: what a copy in grey or an eye without one colour still tells apart."""
LINES = ("-", "--", ":", "-.")
INVALID, CLAIMED = "////", "\\\\\\\\"
"""The hatches of a result that is not valid, and of a published figure; both on white."""
LONGEST_COLUMN = 12
"""Names in one column of a legend."""
SUFFIXES = (".svg", ".png", ".pdf")
_METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": "OptiGPU"},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": "OptiGPU"},
}
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a chart looks the same everywhere
    "font.size": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "grid.color": "#e4e4e4",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "optigpu",  # else every file has other ids
}


def check_path(path: Path) -> None:
    """Raises SpecError if the suffix is not one that charts are written in."""
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError(f"{path} must end with one of {', '.join(SUFFIXES)}, the formats of charts.")


@contextmanager
def canvas(
    path: Path, title: str, width_in: float, height_in: float, origin: str | None = None
) -> Iterator["Axes"]:
    """Axes to draw on; the file is written at the end. No display is needed. `origin` stands below the chart.

    Raises SpecError for another suffix than those of SUFFIXES, OptiGPUError when the file cannot be written.
    """
    with _styled(path, width_in, height_in) as figure:
        axes = figure.subplots()
        axes.set_title(fill(title, int(width_in * 11)), weight="bold", pad=12)
        axes.set_axisbelow(True)
        _sign(figure, width_in, origin)
        yield axes


@contextmanager
def sheet(
    path: Path, title: str, size_in: tuple[float, float], shape: tuple[int, int], footer: str
) -> Iterator[list["Axes"]]:
    """Several axes on one page, in `shape[0]` rows of `shape[1]`; as `canvas` otherwise."""
    with _styled(path, *size_in) as figure:
        heading = fill(title, int(size_in[0] * 10))
        figure.suptitle(heading, x=0.01, ha="left", weight="bold", fontsize=11.5)
        _sign(figure, size_in[0], footer)
        grid = figure.subplots(*shape, squeeze=False)
        for axes in grid.flat:
            axes.set_axisbelow(True)
        yield list(grid.flat)


@contextmanager
def _styled(path: Path, width_in: float, height_in: float) -> Iterator["Figure"]:
    check_path(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's settings for other charts must not change ours
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        _save(figure, path)


def _sign(figure: "Figure", width_in: float, footer: str | None) -> None:
    """When, where and with what it was measured, below the chart; lines stay lines."""
    if footer:
        lines = [fill(line, int(width_in * 17)) for line in footer.splitlines()]
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=FAINT)


def _save(figure: "Figure", path: Path) -> None:
    suffix = path.suffix.lower()
    try:
        figure.savefig(path, format=suffix[1:], dpi=160, metadata=_METADATA[suffix], bbox_inches="tight")
    except OSError as error:
        raise OptiGPUError(f"{path} cannot be written: {error.strerror}.") from error


def mark(number: int, valid: bool) -> dict[str, Any]:
    """Colour and shape of the variant at that place of the chart; hollow if its result is invalid."""
    colour = COLOURS[number % len(COLOURS)]
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "color": colour,
        "markerfacecolor": colour if valid else "white",
        "markeredgecolor": INK,  # light colours alone have too little contrast with paper
        "markeredgewidth": 0.8,
        "markersize": 7.0,
        "linestyle": "none",
        "elinewidth": 1.2,
        "capsize": 3.0,
    }


def bar_look(number: int, *, valid: bool = True, claimed: bool = False) -> dict[str, Any]:
    """Colour, hatch and edge of the bars of that series."""
    hatch = CLAIMED if claimed else INVALID if not valid else HATCHES[number % len(HATCHES)]
    plain = valid and not claimed
    face = COLOURS[number % len(COLOURS)] if plain else "white"
    return {"facecolor": face, "edgecolor": INK, "linewidth": 0.8, "hatch": hatch}


def size_for(names: int) -> tuple[float, float]:
    """Width and height, in inches, of a chart with that many names in its legend."""
    columns = math.ceil(names / LONGEST_COLUMN)
    return 6.6 + 2.9 * columns, max(5.2, 0.62 * min(names, LONGEST_COLUMN))


def legend(axes: "Axes", names: int) -> None:
    """The names of the variants, beside the chart."""
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        borderaxespad=0.0,
        labelspacing=0.9,
        ncols=math.ceil(names / LONGEST_COLUMN),
    )


def note(axes: "Axes", text: str) -> None:
    axes.annotate(
        fill(text, 110),
        xy=(0.0, 0.0),
        xycoords="axes fraction",
        xytext=(0, -38),
        textcoords="offset points",
        va="top",
        color=FAINT,
        fontsize=8,
    )


def name_of(result: Document, width: int = 34) -> str:
    """A variant's label in lines of at most `width` characters; an invalid one says so."""
    label = result["variant"]["label"]
    return fill(label if is_valid(result) else f"{label} (invalid)", width)


def is_valid(result: Document) -> bool:
    return bool(result["verdict"]["valid"])


def sides(metric: Document, scale: float = 1.0) -> list[list[float]] | None:
    """The interval as matplotlib takes it: its distances below and above the value."""
    if not metric.get("ci"):
        return None
    low, high = metric["ci"]
    value = metric["value"]
    return [[max(0.0, value - low) * scale], [max(0.0, high - value) * scale]]
