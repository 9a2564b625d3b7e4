"""What the runs of `benchmarks.noise` must show, and their table."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from benchmarks.load import NAME, Load, Pattern
from optigpu.documents.result import VerdictReason
from optigpu.report import Column, Grid
from optigpu.report.numbers import MISSING, short

T = TypeVar("T")

RATIO_WITHIN, RATIO_UP_TO_CORES = 0.05, 0.5
COVERED = 0.95
"""19 of 20."""
BURSTS_WITHIN, BURSTS_OF_CORES = 0.03, 0.2
DISTURBED = "disturbed"


@dataclass(frozen=True)
class Figure:
    """One variant's primary metric in one run, and its verdict."""

    label: str
    value: float
    ci: tuple[float, float] | None
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def names_the_load(self) -> bool:
        """Whether it is marked as disturbed by others, and says by whom."""
        marked = VerdictReason.FOREIGN_PROCESS in self.reasons or DISTURBED in self.warnings
        return marked and any(NAME in note for note in self.notes)


@dataclass(frozen=True)
class Ratio:
    """The fast variant over the baseline, as the job's attribution has it."""

    value: float
    ci: tuple[float, float] | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One ladder beside a load (None: quiet), which used so many cores. `ratio` is None where none was given.

    Runs of one `sitting` have the same number: the machine may be another one the next time.
    """

    load: Load | None
    used_cores: float
    figures: tuple[Figure, ...]
    ratio: Ratio | None
    sitting: int = 0


@dataclass(frozen=True)
class Goal:
    """How often something held, of how many cases, and how often it must."""

    name: str
    held: int
    of: int
    least: int

    @property
    def met(self) -> bool:
        return self.of > 0 and self.held >= self.least

    def line(self) -> str:
        """The counts beside the goal."""
        return f"{'met' if self.met else 'NOT MET':7}  {self.held} of {self.of} (goal: {self.least})  {self.name}"


@dataclass(frozen=True)
class Quiet:
    """The means of a sitting's quiet runs."""

    figures: dict[str, float]
    ratio: float | None

    @classmethod
    def of(cls, runs: Iterable[Run], sitting: int) -> "Quiet":
        """Of all runs the quiet ones of one sitting."""
        quiet = [run for run in runs if run.load is None and run.sitting == sitting]
        values: dict[str, list[float]] = {}
        for figure in _figures(quiet):
            values.setdefault(figure.label, []).append(figure.value)
        ratios = [run.ratio.value for run in quiet if run.ratio]
        return cls(
            {label: fmean(found) for label, found in values.items()}, fmean(ratios) if ratios else None
        )

    def change(self, figure: Figure) -> float:
        """Relative to the quiet mean of the same variant."""
        return figure.value / self.figures[figure.label] - 1 if figure.label in self.figures else float("inf")

    def ratio_change(self, run: Run) -> float:
        """Relative to the quiet mean; infinite where either has none."""
        return run.ratio.value / self.ratio - 1 if run.ratio and self.ratio else float("inf")

    def is_ratio_inside(self, run: Run) -> bool:
        """Whether the interval of the run's ratio contains the quiet mean."""
        found = run.ratio.ci if run.ratio else None
        return self.ratio is not None and found is not None and found[0] <= self.ratio <= found[1]

    def is_inside(self, figure: Figure) -> bool:
        """Whether the figure's interval contains the quiet mean."""
        known = self.figures.get(figure.label)
        return known is not None and figure.ci is not None and figure.ci[0] <= known <= figure.ci[1]


@dataclass(frozen=True)
class Judged:
    """A figure of a run, with the quiet means that it is compared with."""

    figure: Figure
    quiet: Quiet


def goals_of(runs: Sequence[Run]) -> list[Goal]:
    """All goals, by what the runs showed."""
    quiet = quiet_means(runs)

    def figures(chosen: Iterable[Run]) -> list[Judged]:
        return [Judged(figure, quiet[run.sitting]) for run in chosen for figure in run.figures]

    loaded = [run for run in runs if run.load and not run.load.nice]
    light = [run for run in loaded if run.load and run.load.cores <= RATIO_UP_TO_CORES]
    bursts = [run for run in light if run.load == Load(BURSTS_OF_CORES, Pattern.BURSTS)]
    heavy = [run for run in loaded if run.load and run.load.cores > RATIO_UP_TO_CORES]
    restless = [run for run in runs if run.load and run.load.nice]
    return [
        _counted(
            f"ratios within {RATIO_WITHIN:.0%} of the quiet mean, up to {RATIO_UP_TO_CORES:g} cores",
            light,
            lambda run: abs(quiet[run.sitting].ratio_change(run)) <= RATIO_WITHIN,
        ),
        _counted(
            f"intervals of figures that contain the quiet mean, up to {RATIO_UP_TO_CORES:g} cores",
            figures(light),
            lambda each: each.quiet.is_inside(each.figure),
            share=COVERED,
        ),
        _counted(
            f"figures within {BURSTS_WITHIN:.0%} of the quiet mean, bursts of {BURSTS_OF_CORES:g} cores",
            figures(bursts),
            lambda each: abs(each.quiet.change(each.figure)) <= BURSTS_WITHIN,
        ),
        _counted("ratios printed, beyond that", heavy, lambda run: run.ratio is not None),
        _counted(
            "figures beyond that with no wrong reason, and with the right one unless they are right themselves",
            figures(heavy),
            is_judged_rightly,
        ),
        _counted(
            "figures beside a process that never rests that name it",
            figures(restless),
            lambda each: each.figure.names_the_load,
        ),
        _counted(
            "quiet figures without a reason and a warning",
            figures(run for run in runs if run.load is None),
            lambda each: not each.figure.reasons and not each.figure.warnings,
        ),
        _counted(
            f"intervals of ratios that contain the quiet mean, up to {RATIO_UP_TO_CORES:g} cores",
            light,
            lambda run: quiet[run.sitting].is_ratio_inside(run),
            share=COVERED,
        ),
    ]


def quiet_means(runs: Sequence[Run]) -> dict[int, Quiet]:
    """Of each sitting."""
    return {sitting: Quiet.of(runs, sitting) for sitting in {run.sitting for run in runs}}


def is_judged_rightly(judged: Judged) -> bool:
    """Bursts leave clean rounds, and a high priority keeps a steady load out: what is right then needs no mark."""
    figure = judged.figure
    if set(figure.reasons) - {VerdictReason.FOREIGN_PROCESS}:
        return False
    unmarked = not figure.reasons and DISTURBED not in figure.warnings
    return figure.names_the_load or (unmarked and judged.quiet.is_inside(figure))


def _counted(name: str, cases: Iterable[T], holds: Callable[[T], bool], share: float = 1.0) -> Goal:
    found = [holds(case) for case in cases]
    return Goal(name, sum(found), len(found), math.ceil(share * len(found)))


def _figures(runs: Iterable[Run]) -> list[Figure]:
    return [figure for run in runs for figure in run.figures]


def grid_of(runs: Sequence[Run]) -> Grid:
    """A line for each load: the means of its runs, and how far the worst is from quiet."""
    quiet = quiet_means(runs)
    labels = list(dict.fromkeys(figure.label for figure in _figures(runs)))
    loads = dict.fromkeys(run.load for run in runs)
    return Grid(
        title="The same ladder beside the work of others",
        columns=(
            Column("load"),
            Column("cores used", right=True),
            *(Column(label, right=True) for label in labels),
            Column("ratio", right=True),
            Column("reasons"),
            Column("warnings"),
        ),
        rows=tuple(_cells(load, [run for run in runs if run.load == load], labels, quiet) for load in loads),
        notes=("In brackets: the farthest of the runs from the mean of the quiet ones of its sitting.",),
    )


def _cells(
    load: Load | None, runs: Sequence[Run], labels: Sequence[str], quiet: Mapping[int, Quiet]
) -> tuple[str, ...]:
    columns = []
    for label in labels:
        found = [(run, figure) for run in runs for figure in run.figures if figure.label == label]
        values = [figure.value for _, figure in found]
        columns.append(_mean(values, [quiet[run.sitting].change(figure) for run, figure in found]))
    ratios = [run.ratio.value for run in runs if run.ratio]
    return (
        load.label if load else "quiet",
        f"{fmean(run.used_cores for run in runs):.2f}",
        *columns,
        _mean(ratios, [quiet[run.sitting].ratio_change(run) for run in runs if run.ratio]),
        _tally(reason for figure in _figures(runs) for reason in figure.reasons),
        _tally(warning for figure in _figures(runs) for warning in figure.warnings),
    )


def _mean(values: Sequence[float], changes: Sequence[float]) -> str:
    return f"{short(fmean(values))} ({max(changes, key=abs):+.1%})" if values else MISSING


def _tally(names: Iterable[str]) -> str:
    """Each name with how often it occurs."""
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in found.items())
