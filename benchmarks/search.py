"""Does a search find the best stack of an exhaustive grid, and at which part of its cost?

    python -m benchmarks.search                      # bundled:tiny with three techniques: eight stacks
    python -m benchmarks.search --model preset:gpt2

Both measure the same stacks with the same settings, one after the other; both costs are wall clock, so compare them
alone: the machine's speed drifts. A short job before them measures the machine's peak rates, which are kept for a day,
and reads the libraries into the page cache. The search is right if it ends with the grid's best stack, or with one
whose speed in the grid lies within the best one's interval. Each cost comes in its parts, all processes together:
"start" is everything until a process is ready (of it "import" and the loading of models), "between" what no part has.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from optigpu.documents.events import Event
from optigpu.documents.result import Result
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run

MENU = ("int8_weight_only", "static_kv_cache", "fused_gelu")
"""Three techniques that go together, so that every combination is a stack."""


@dataclass(frozen=True)
class Measured:
    """A job's seconds, in all and by what they went into, its best stack and that stack's speed."""

    seconds: float
    parts: Mapping[str, float]
    best: str
    tokens_per_s: float


def measured(spec: JobSpec) -> tuple[Report, Measured]:
    """Runs the job."""
    started = time.monotonic()
    report = run(spec, on_event=_ignore)
    seconds = time.monotonic() - started
    best = _best(report)
    return report, Measured(seconds, parts_of(report, seconds), best.variant.label, _speed(best))


def parts_of(report: Report, seconds: float) -> dict[str, float]:
    """What a job's seconds went into."""
    known = dict(report.spent)
    within_start = known.pop("import", 0.0)
    between = seconds - sum(known.values())
    return known | {"import (of start)": within_start, "between": between}


def compared(grid: Report, found: Measured) -> dict[str, object]:
    """Whether the stack that a search found is the grid's best, or within the interval of it."""
    by_label = {result.variant.label: result for result in grid.results}
    best = _best(grid)
    bounds = best.metrics["tokens_per_s"].ci
    in_grid = by_label[found.best]
    theirs = in_grid.metrics["tokens_per_s"].ci
    overlaps = bool(bounds and theirs and theirs[1] >= bounds[0])
    return {"same": found.best == best.variant.label, "within_interval": overlaps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled:tiny")
    parser.add_argument("--max-seconds", type=float, default=15.0)
    parser.add_argument("--replicates", type=int, default=3)
    given = parser.parse_args()
    job = {
        "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 32},
        "model": given.model,
        "stack": [{"name": name} for name in MENU],
        "measure": {
            "replicates": given.replicates,
            "min_seconds": given.max_seconds,
            "max_seconds": given.max_seconds,
            "meters": ["latency", "memory"],
        },
        "limits": {"wait_for_quiet_s": 0, "timeout_s": 7200},
    }
    short = {"replicates": 1, "min_seconds": 0.1, "max_seconds": 0.1, "meters": ["latency"]}
    run(JobSpec.model_validate(job | {"stack": [], "measure": short}), on_event=_ignore)
    _, found = measured(JobSpec.model_validate(job | {"plan": "search"}))
    grid, whole = measured(JobSpec.model_validate(job | {"plan": "grid"}))
    print(
        json.dumps(
            {
                "search": asdict(found),
                "grid": asdict(whole),
                "share_of_cost": found.seconds / whole.seconds,
                **compared(grid, found),
                "speeds_in_grid": {result.variant.label: _speed(result) for result in grid.results},
            },
            indent=2,
        )
    )


def _best(report: Report) -> Result:
    """The fastest of those that were measured as asked: all of a grid, the last round of a search."""
    rounds = {id(result): result.facts.recorded for result in report.results}
    last = [
        result
        for result in report.results
        if rounds[id(result)].get("search_round") == rounds[id(result)].get("search_rounds")
    ]
    if not last:
        raise SystemExit("\n".join(str(outcome.reason) for outcome in report.outcomes))
    return max(last, key=_speed)


def _ignore(event: Event) -> None:
    """Progress is not shown."""


def _speed(result: Result) -> float:
    return result.metrics["tokens_per_s"].value or 0.0


if __name__ == "__main__":
    main()
