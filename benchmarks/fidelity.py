"""`python -m benchmarks.fidelity`: a bare hand-written loop against the engine's figure for the same variant.

Pairs of processes take turns, bare and ours; the ratio's 95% interval must lie within 0.97..1.03.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.progress import track

from optigpu.conductor.variables import child_variables
from optigpu.hardware import probe
from optigpu.models.presets import PRESETS
from optigpu.report import console
from optigpu.run import run
from optigpu.spec import JobSpec
from optigpu.stats import paired_ratio
from optigpu.vocabulary import OptiGPUError, utc_now

ROOT = Path(__file__).resolve().parents[1]
LOW, HIGH = 0.97, 1.03


def main() -> int:
    """Measures the pairs; the exit status is 0 when the interval lies within the bounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--preset", default="gpt2", choices=list(PRESETS))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    ours, bare = [], []
    for number in track(range(options.pairs), "pairs", console=console(stderr=True)):
        # Who goes first alternates, so that neither always finds the warmer machine.
        order = (bare_rate, engine_rate) if number % 2 else (engine_rate, bare_rate)
        for measured in order:
            (ours if measured is engine_rate else bare).append(measured(options.preset, options.requests))
    ratio, bounds = paired_ratio(tuple((each,) for each in ours), tuple((each,) for each in bare))
    low, high = bounds or (-math.inf, math.inf)
    document = {
        "benchmark": "fidelity",
        "at": utc_now().isoformat(),
        "environment": probe().model_dump(mode="json"),
        "preset": options.preset,
        "engine_tokens_per_s": ours,
        "bare_tokens_per_s": bare,
        "ratio": ratio,
        "ci": bounds,
    }
    if options.output:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    within = low >= LOW and high <= HIGH
    console().print(
        f"engine over bare loop: {ratio:.4f} [{low:.4f}, {high:.4f}] from {options.pairs} pairs of processes; "
        f"{'within' if within else 'NOT within'} {LOW}..{HIGH}",
        markup=False,
    )
    return 0 if within else 1


def engine_rate(preset: str, requests: int) -> float:
    """tokens/s of the baseline, as `optigpu run` says it, of one process."""
    document: dict[str, Any] = {
        "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64},
        "model": f"preset:{preset}",
        "measure": {
            "replicates": 1,
            "min_seconds": 0.5 * requests,
            "max_seconds": 60,
            "rel_ci": 0.02,
            "meters": ["latency"],
        },
    }
    report = run(JobSpec.model_validate(document), lambda _: None)
    if not report.results:
        raise OptiGPUError(f"The engine measured nothing: {report.outcomes[0].reason}")
    value = report.results[0].metrics["tokens_per_s"].value
    assert value is not None
    return value


def bare_rate(preset: str, requests: int) -> float:
    """tokens/s of the bare loop, in a process with the same variables and threads."""
    threads = probe().cpu_cores
    shapes = PRESETS[preset]
    command = [
        *(sys.executable, "-m", "benchmarks.bare_loop", "--model-type", shapes.model_type),
        *("--config", json.dumps(shapes.config), "--threads", str(threads), "--requests", str(requests)),
    ]
    answer = subprocess.run(
        command, cwd=ROOT, env=child_variables(threads), capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise OptiGPUError(f"The bare loop failed: {answer.stderr.strip().splitlines()[-1]}")
    return float(answer.stdout)


if __name__ == "__main__":
    sys.exit(main())
