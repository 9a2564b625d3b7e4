"""`python -m benchmarks.noise`: what the work of others does to figures, to ratios and to verdicts.

The same small ladder is measured quiet, beside 0.2, 0.5 and 1.0 cores of others' work, steady and in bursts, and
beside one process that never rests at the lowest priority. One run of each, then the next of each, since the speed of
a machine changes within the hour. The goals are for two cores, and the machine must be quiet otherwise. `--resume` adds
to the runs of an earlier sitting; runs are compared with the quiet ones of their own sitting. The exit status is 0 if
all goals are met, 1 if not, and 2 if nothing could be measured.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.progress import track

from benchmarks.document import measured_before, write
from benchmarks.load import PROGRAM, Load, Pattern, beside
from benchmarks.noise_goals import Figure, Ratio, Run, goals_of, grid_of
from optigpu.documents.events import Event
from optigpu.documents.result import Gain, Result
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.report import console, terminal
from optigpu.vocabulary import DeviceKind, OptiGPUError

CORES = (0.2, 0.5, 1.0)
LOADS = (
    *(Load(cores, pattern) for pattern in Pattern for cores in CORES),
    Load(1.0, Pattern.STEADY, nice=19),
)
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
        return run_of(None, 0.0, run(spec, _silent))
    with beside(load, seed, program) as running:
        report = run(spec, _silent)
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
    return Run(load, used_cores, tuple(map(_figure, report.results)), _ratio(gain) if gain else None)


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


def _ratio(gain: Gain) -> Ratio:
    return Ratio(gain.ratio, gain.ci, tuple(map(str, gain.reasons)))


def document_of(options: argparse.Namespace, runs: list[Run]) -> dict[str, Any]:
    """Every run with its figures, and the goals as they stand."""
    return {
        "spec": spec_of(options, wait_s=60.0).model_dump(mode="json"),
        "runs": [asdict(run) for run in runs],
        "goals": [asdict(goal) | {"met": goal.met} for goal in goals_of(runs)],
    }


def _silent(_: Event) -> None:
    """Ignores events."""


if __name__ == "__main__":
    sys.exit(main())
