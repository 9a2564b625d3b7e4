"""Where a job's time went, as a table and as a chart."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from optigpu.documents.events import Span
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report, of_panels
from optigpu.report.formats import Grid, columns
from optigpu.vocabulary import Better, SpecError

MOST_PHASES = 4
"""Columns of the table; what took less is together under "other"."""
SHORT = {
    "looking for other processes": "wait",
    "measuring the peak rates of this machine": "peaks",
    "computing the quality reference": "reference",
    "starting": "start",
    "loading": "load",
    "applying": "apply",
    "hashing the weights": "hash",
    "compiling": "compile",
    "warming up": "warm up",
    "measuring": "measure",
    "checking with fresh inputs": "check",
    "ending": "end",
}
"""Headings of phases; a meter's name is its own."""
WHOLE_JOB = "the whole job"
NO_TIMELINE = "Only a run that this version kept has a timeline; `optigpu run` and `optigpu ladder` keep one."


def timeline_grid(title: str, spans: Sequence[Span], labels: Mapping[int, str]) -> Grid:
    """A row for each variant, over all its processes, and one for what was done for all of them; seconds."""
    # The phases that took most, in the order in which they began.
    seconds = _by_phase(spans)
    longest = sorted(seconds, key=lambda doing: -seconds[doing])[:MOST_PHASES]
    phases = [doing for doing in seconds if doing in longest]
    rows = [_row(_label(index, labels), own, phases) for index, own in _by_variant(spans).items()]
    rows.append(_row("all", spans, phases))
    processes = len({(span.index, span.replicate) for span in spans if span.index is not None})
    return Grid(
        title=title,
        columns=columns(
            "variant", *(f"{SHORT.get(each, each)}:" for each in phases), "other:", "all:", "CPU:"
        ),
        rows=tuple(rows),
        notes=(
            f"Seconds of {processes} process{'' if processes == 1 else 'es'}; CPU seconds are those of the "
            "measuring processes.",
        ),
    )


def timeline_data(report: Report) -> ChartData:
    """The seconds of each phase, and those of each variant. Raises SpecError where the run has no timeline."""
    if not report.timeline:
        raise SpecError(NO_TIMELINE)
    labels = {row.index: row.label for row in report.rows}
    phases = _by_phase(report.timeline)
    variants = [(_label(index, labels), _seconds(own)) for index, own in _by_variant(report.timeline).items()]
    panels = (_panel("by phase", phases.items()), _panel("by variant", variants))
    return of_panels(report, report.results, *panels)


def _panel(title: str, seconds: Iterable[tuple[str, float]]) -> Panel:
    marks = tuple(Mark(label=name, value=value, text=f"{value:.1f} s") for name, value in seconds)
    return Panel(title=title, form=Form.BARS, axis="seconds", better=Better.LOWER, marks=marks)


def _label(index: int | None, labels: Mapping[int, str]) -> str:
    return WHOLE_JOB if index is None else labels.get(index, str(index))


def _row(label: str, spans: Sequence[Span], phases: Sequence[str]) -> tuple[str, ...]:
    found, whole = _by_phase(spans), _seconds(spans)
    others = [seconds for doing, seconds in found.items() if doing not in phases]
    figures = [
        *map(found.get, phases),
        sum(others) if others else None,
        whole,
        sum(span.cpu_s for span in spans),
    ]
    return (label, *("" if each is None else f"{each:.1f}" for each in figures))


def _by_variant(spans: Iterable[Span]) -> dict[int | None, list[Span]]:
    """The job's own first, then the variants in the order of the plan."""
    found: dict[int | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: -1 if span.index is None else span.index):
        found[span.index].append(span)
    return found


def _by_phase(spans: Iterable[Span]) -> dict[str, float]:
    """The seconds of each phase, in the order in which they began."""
    seconds: dict[str, float] = defaultdict(float)
    for span in sorted(spans, key=lambda span: span.began_s):
        seconds[span.doing] += span.seconds
    return seconds


def _seconds(spans: Iterable[Span]) -> float:
    return sum(span.seconds for span in spans)
