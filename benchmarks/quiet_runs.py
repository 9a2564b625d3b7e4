"""`python -m benchmarks.quiet_runs`: how often a detector reports a disturbance on a quiet machine.

The same job is run again and again on a machine that does nothing else; whatever reason a verdict has is a false alarm.
Goal: none in 20 runs. Warnings are counted as well: `shared_host` may be true of a virtual machine.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.document import write
from optigpu.documents.events import Event
from optigpu.documents.result import Result, VerdictReason, VerdictWarning
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.report import console
from optigpu.vocabulary import DeviceKind

WORKLOADS: dict[str, dict[str, Any]] = {
    "generate": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 32},
    "matmul": {"kind": "matmul", "sizes": [1024]},
}


def main() -> int:
    """Runs the jobs and prints their verdicts; ends with status 1 when one of them has a reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quiet_runs", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--replicates", type=int, default=3)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="generate")
    parser.add_argument("--model", default="preset:tiny-llama-test", help="of a workload that runs one")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed requests for each process")
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind), default=DeviceKind.CPU)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    spec = spec_of(options)
    results = [
        result
        for _ in track(range(options.runs), "runs", console=console(stderr=True))
        for result in run(spec, _silent).results
    ]
    figures = figures_of(results)
    if options.output:
        write(options.output, "quiet_runs", {"spec": spec.model_dump(mode="json"), **figures})
    console().print(text_of(figures), soft_wrap=True, markup=False)
    return 1 if any(figures["reasons"].values()) or len(results) < options.runs else 0


def spec_of(options: argparse.Namespace) -> JobSpec:
    """The job that is run again and again."""
    workload = WORKLOADS[options.workload]
    measure = {
        "replicates": options.replicates,
        "min_seconds": options.seconds,
        "max_seconds": 4 * options.seconds,
        "meters": ["latency"],
    }
    document = {"workload": workload, "device": options.device, "measure": measure}
    if workload["kind"] != "matmul":
        document["model"] = options.model
    return JobSpec.model_validate(document)


def figures_of(results: list[Result]) -> dict[str, Any]:
    """How many results have each reason and each warning, and every note once."""
    verdicts = [result.verdict for result in results]
    reasons = Counter(reason for verdict in verdicts for reason in verdict.reasons)
    warnings = Counter(warning for verdict in verdicts for warning in verdict.warnings)
    return {
        "results": len(results),
        "reasons": {str(reason): reasons[reason] for reason in VerdictReason},
        "warnings": {str(warning): warnings[warning] for warning in VerdictWarning},
        "notes": list(dict.fromkeys(note for verdict in verdicts for note in verdict.notes)),
    }


def text_of(figures: dict[str, Any]) -> str:
    """The counts, then the notes."""
    lines = [f"{figures['results']} results of the same job"]
    lines += [f"  {name:20} {count:4}  (goal: 0)" for name, count in figures["reasons"].items()]
    lines += [f"  {name:20} {count:4}  (a mark)" for name, count in figures["warnings"].items()]
    return "\n".join(lines + [f"- {note}" for note in figures["notes"]])


def _silent(_: Event) -> None:
    """Ignores events."""


if __name__ == "__main__":
    sys.exit(main())
