"""`python -m benchmarks.noise`: what the work of others does to figures, to ratios and to verdicts.

The same small ladder is measured quiet, beside 0.2, 0.5 and 1.0 cores of others' work, steady and in bursts, and
beside one process that never rests at the lowest priority. One run of each, then the next of each, since the speed of
a machine changes within the hour. The goals are for two cores, and the machine must be quiet otherwise. `--resume` adds
to the runs of an earlier sitting; runs are compared with the quiet ones of their own sitting. The exit status is 0 if
all goals are met, 1 if not, and 2 if nothing could be measured.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from pydantic import TypeAdapter
from rich.progress import track

from benchmarks.document import measured_before, write
from benchmarks.jobs import silent
from benchmarks.load import NAME, PROGRAM, Load, Pattern, beside
from optigpu.documents.result import Result, VerdictReason
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.report.formats import MISSING, Grid, columns, console, short, terminal
from optigpu.vocabulary import DeviceKind, OptiGPUError

CORES = (0.2, 0.5, 1.0)
LOADS = (
    *(Load(cores, pattern) for pattern in Pattern for cores in CORES),
    Load(1.0, Pattern.STEADY, nice=19),
)
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


RUNS = TypeAdapter(list[Run])


def main(program: Sequence[str] = PROGRAM) -> int:
    """Measures and prints the table and the goals. `program` is the load program's command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each load")
    parser.add_argument(
        "--minutes", type=float, default=240.0, help="no turn of all loads begins later than that"
    )
    parser.add_argument("--model", default="preset:gpt2")
    parser.add_argument("--stack", default="int8_weight_only", help="the technique of the ladder")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--replicates", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed requests for each process")
    parser.add_argument(
        "--usual-priority", action="store_true", help="measure as someone without the right to a higher one"
    )
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--resume", action="store_true", help="go on with the runs of the file of --output")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    try:
        runs = runs_before(options) if options.resume else []
        sitting = max((run.sitting for run in runs), default=-1) + 1
        with beside(LOADS[0], 0, program):
            pass  # a load program that cannot start is known before anything is measured
        turns = range(turns_done(runs), options.runs)
        for number in track(turns, "runs of each load", console=console(stderr=True)):
            if time.monotonic() > ends:
                break
            for load in (None, *LOADS):
                runs.append(replace(measured(options, load, number, program), sitting=sitting))
                if options.output:
                    # After each one: half an hour's figures should not be lost with its last minute.
                    write(options.output, "noise", document_of(options, runs))
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    goals = goals_of(runs)
    screen = console()
    screen.print(terminal(grid_of(runs)))
    for goal in goals:
        screen.print(goal.line(), markup=False, soft_wrap=True)
    return 0 if all(goal.met for goal in goals) else 1


def runs_before(options: argparse.Namespace) -> list[Run]:
    """The runs of the file. Raises OptiGPUError if it cannot be read, or was about another job."""
    spec = spec_of(options, wait_s=60.0).model_dump(mode="json")
    return RUNS.validate_python(measured_before(options.output, spec, "runs"))


def turns_done(runs: Sequence[Run]) -> int:
    """How often every load has been measured."""
    return min(sum(run.load == load for run in runs) for load in (None, *LOADS))


def measured(options: argparse.Namespace, load: Load | None, seed: int, program: Sequence[str]) -> Run:
    """One ladder beside the load; a quiet one waits for others to rest first. Raises OptiGPUError."""
    spec = spec_of(options, wait_s=60.0 if load is None else 0.0)
    if load is None:
        return run_of(None, 0.0, run(spec, silent))
    with beside(load, seed, program) as running:
        report = run(spec, silent)
        return run_of(load, running.used_cores(), report)


def spec_of(options: argparse.Namespace, wait_s: float) -> JobSpec:
    """The baseline and one technique."""
    return JobSpec.model_validate(
        {
            "workload": {"kind": "generate", "prompt_tokens": 16, "new_tokens": options.new_tokens},
            "model": options.model,
            "device": DeviceKind.CPU,
            "stack": [{"name": options.stack}],
            "plan": "ladder",
            "measure": {
                "replicates": options.replicates,
                "min_seconds": options.seconds,
                "max_seconds": 10 * options.seconds,
                "rel_ci": 0.1,
                "meters": ["latency"],
                "raise_priority": not options.usual_priority,
            },
            "limits": {"wait_for_quiet_s": wait_s},
        }
    )


def run_of(load: Load | None, used_cores: float, report: Report) -> Run:
    """What the goals need of a report. Raises OptiGPUError if a variant has no result."""
    lost = next((outcome.reason for outcome in report.outcomes if outcome.result is None), None)
    if lost is not None:
        raise OptiGPUError(f"A variant could not be measured: {lost}")
    gain = next((row.speedup for row in report.attribution.rows if row.speedup), None)
    found = Ratio(gain.ratio, gain.ci, tuple(map(str, gain.reasons))) if gain else None
    return Run(load, used_cores, tuple(map(_figure, report.results)), found)


def _figure(result: Result) -> Figure:
    primary, verdict = result.metrics[result.variant.primary_metric], result.verdict
    if primary.value is None:
        raise OptiGPUError(f"{result.variant.label} has no figure: {primary.reason}")
    return Figure(
        label=result.variant.label,
        value=primary.value,
        ci=primary.ci,
        reasons=tuple(map(str, verdict.reasons)),
        warnings=tuple(map(str, verdict.warnings)),
        notes=verdict.notes,
    )


def document_of(options: argparse.Namespace, runs: list[Run]) -> dict[str, Any]:
    """Every run with its figures, and the goals as they stand."""
    return {
        "spec": spec_of(options, wait_s=60.0).model_dump(mode="json"),
        "runs": [asdict(run) for run in runs],
        "goals": [asdict(goal) | {"met": goal.met} for goal in goals_of(runs)],
    }


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
        columns=columns(
            "load", "cores used:", *(f"{label}:" for label in labels), "ratio:", "reasons", "warnings"
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
    return ", ".join(f"{name} {count}" for name, count in Counter(names).items())


if __name__ == "__main__":
    sys.exit(main())
