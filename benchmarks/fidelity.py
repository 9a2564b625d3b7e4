"""`python -m benchmarks.fidelity`: a bare hand-written loop against the engine's figure for the same variant.

The two processes of a pair are resident side by side and take turns, a request each, since a virtual machine's speed
varies by more within seconds than the two may differ. The 95% interval of the ratio of their medians, over the pairs,
must lie within 0.97..1.03.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import track

from benchmarks.document import write
from benchmarks.jobs import session_of
from optigpu.child.messages import Ready, Round, RunRound
from optigpu.conductor.processes.child import ask
from optigpu.conductor.processes.confinement import child_variables
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.models.reference import PRESETS
from optigpu.report.formats import console
from optigpu.statistics.intervals import paired_ratio
from optigpu.vocabulary import OptiGPUError

ROOT = Path(__file__).resolve().parents[1]
LOW, HIGH = 0.97, 1.03
GENERATE = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64}


def main() -> int:
    """Measures the pairs; the exit status is 0 when the interval lies within the bounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--preset", default="gpt2", choices=list(PRESETS))
    parser.add_argument("--requests", type=int, default=10, help="of each process, timed")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    numbers = track(range(options.pairs), "pairs", console=console(stderr=True))
    pairs = [rates_of_pair(options.preset, options.requests, number % 2) for number in numbers]
    ours, bare = tuple(ours for ours, _ in pairs), tuple(bare for _, bare in pairs)
    ratio, bounds = paired_ratio(ours, bare)
    low, high = bounds or (-math.inf, math.inf)
    if options.output:
        figures = {
            "preset": options.preset,
            "engine_tokens_per_s": ours,
            "bare_tokens_per_s": bare,
            "ratio": ratio,
            "ci": bounds,
        }
        write(options.output, "fidelity", figures)
    within = low >= LOW and high <= HIGH
    console().print(
        f"engine over bare loop: {ratio:.4f} [{low:.4f}, {high:.4f}] from {options.pairs} pairs of processes; "
        f"{'within' if within else 'NOT within'} {LOW}..{HIGH}",
        markup=False,
    )
    return 0 if within else 1


def rates_of_pair(preset: str, requests: int, second: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """tokens/s of each request of an engine's process and of a bare one.

    Who goes first in each turn is `second` (0: the engine), so that over the pairs neither always follows the other.
    Raises OptiGPUError when a process fails.
    """
    document = {
        "workload": GENERATE,
        "model": f"preset:{preset}",
        "measure": {"replicates": 1},
        "device": "cpu",
    }
    spec = JobSpec.model_validate(document)
    (variant,) = variants_of(spec)
    with (
        session_of(spec, variants=1) as session,
        session.child(variant) as child,
        bare_process(preset, session.threads) as bare,
    ):
        ask(child, session.assignment(variant, 0), Ready, session.progress)
        if _line(bare) != "ready":
            raise OptiGPUError("The bare loop failed; what it printed is above.")
        order = RunRound(seconds=0, max_requests=1)
        sides: tuple[Callable[[], float], ...] = (
            lambda: ask(child, order, Round, session.progress).samples["tokens_per_s"][0],
            lambda: float(_line(bare, "\n")),
        )
        turns = [(sides[second](), sides[1 - second]()) for _ in range(requests)]
    by_side = tuple(zip(*turns, strict=True))
    return by_side[second], by_side[1 - second]


@contextmanager
def bare_process(preset: str, threads: int) -> Iterator["subprocess.Popen[str]"]:
    """The bare loop, with the same variables and threads as the engine's process."""
    shapes = PRESETS[preset]
    command = [
        *(sys.executable, "-m", "benchmarks.bare_loop", "--model-type", shapes.model_type),
        *("--config", json.dumps(shapes.config), "--threads", str(threads)),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=child_variables(threads), text=True, stdin=pipe, stdout=pipe
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: "subprocess.Popen[str]", said: str = "") -> str:
    """Sends a text to the process and returns its answer of one line."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(said)
    process.stdin.flush()
    return process.stdout.readline().strip()


if __name__ == "__main__":
    sys.exit(main())
