"""`python -m benchmarks.vs_peers`: our stacks beside other ways to run the same model, in the same minutes.

Cases of speed (decode-gpt2, decode-llama-3.2-1b, prefill-gpt2) and of quality (quality-tiny, quality-small). What a
backend runs is measured by jobs, each with llama.cpp Q4_0 in it, whose processes take turns: rows have intervals and
verdicts. What no backend runs takes turns with llama.cpp Q4_0, a request each. The exit status is 0 when every goal was
reached.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.document import write
from benchmarks.peers import PUBLISHED, Peer
from benchmarks.stacks import LLAMA_CPP, Q4_0, Q4_K_M, Case, Stack, details_of
from benchmarks.turns import Figures, measure
from benchmarks.vs_cases import (
    ALONE,
    BF16,
    COMPILED,
    ELSEWHERE,
    FP32,
    OURS,
    QUALITY,
    SPEED,
    Speed,
    quality_goal,
    speed_goals,
)
from benchmarks.vs_jobs import measured as measured_jobs
from benchmarks.vs_quality import measured
from benchmarks.vs_tables import markdown
from optigpu.backends import BACKENDS
from optigpu.documents.events import as_document
from optigpu.hardware import probe
from optigpu.report import console
from optigpu.report.progress import RunProgress
from optigpu.vocabulary import OptiGPUError


def main() -> int:
    """Measures the cases that were asked for, or shows a document."""
    options = _options()
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return 0
    document: dict[str, Any] = {
        "load_before": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "speed": {
            name: speed(case.of_goals() if options.goals else case, options.turns, measure_of(options))
            for name, case in SPEED.items()
            if name in options.cases
        },
        "quality": {
            name: quality(model, options.sequences)
            for name, model in QUALITY.items()
            if name in options.cases
        },
    }
    document["goals"] = goals(document)
    print(markdown(document))
    if options.output:
        write(options.output, "vs_peers", document)
    return 0 if all(goal["reached"] for goal in document["goals"]) else 1


def measure_of(options: argparse.Namespace) -> dict[str, Any]:
    """How the jobs measure."""
    return {
        "replicates": options.replicates,
        "min_seconds": options.seconds,
        "max_seconds": 6 * options.seconds,
        "meters": ["latency", "memory"],
    }


def speed(speed: Speed, turns: int, how: dict[str, Any]) -> dict[str, Any]:
    """The lines of a case, that first that the others are divided by; that is fp32 where llama.cpp is missing."""
    case = speed.case
    reference = FP32 if BACKENDS[Q4_0.backend].missing(probe()) else Q4_0
    others = [stack for stack in (Q4_0, *speed.stacks) if stack != reference]
    about = {"case": asdict(case), "measure": how, "turns": turns, "published": _published(case)}
    try:
        with RunProgress(console(stderr=True)) as progress:
            jobs = measured_jobs(
                [reference, *others],
                case,
                speed.at_once,
                how,
                lambda event: progress.show(event.kind, as_document(event)),
            )
        lines = [asdict(line) for line in jobs.lines] + in_turns(reference, speed.elsewhere, case, turns)
    except OptiGPUError as error:
        return about | {"reason": str(error)}
    named = [_shown(Figures(name, reason=why)) for name, why in speed.left_out.items()]
    specs = [spec.model_dump(mode="json") for spec in jobs.jobs]
    return about | {"lines": lines + named, "jobs": specs}


def in_turns(reference: Stack, peers: Sequence[Peer], case: Case, turns: int) -> list[dict[str, Any]]:
    """What no backend runs, each beside the reference, turn by turn."""
    if not peers:
        return []
    return [_shown(figures) for figures in measure([reference, *peers], case, turns)[1:]]


def _shown(figures: Figures) -> dict[str, Any]:
    """With its turns instead of an interval."""
    return asdict(figures) | {"ratio": figures.ratio, "rate": figures.rate, "group": None}


def quality(model: str, sequences: int) -> dict[str, Any]:
    """Every peer's and every stack's divergence from the fp32 model."""
    found = measured(model, [*OURS, *ALONE, COMPILED, FP32, BF16, *LLAMA_CPP, *ELSEWHERE], Q4_0, sequences)
    for line in found["lines"]:
        if "recorded" in line.get("details", {}):
            line["details"] = details_of(line["details"])
    return found


def goals(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the cases that were measured."""
    found: list[dict[str, Any]] = []
    for name, case in document["speed"].items():
        if "reason" in case:
            found.append({"goal": f"{name}: not measured", "reached": False})
        else:
            found += speed_goals(name, case["lines"])
    found += [
        quality_goal(name, case["lines"], Q4_0.name, Q4_K_M.name)
        for name, case in document["quality"].items()
    ]
    return found


def _published(case: Case) -> dict[str, str]:
    if case.preset not in PUBLISHED or case.measure != "decode":
        return {}
    share, ratio = PUBLISHED[case.preset]
    return {"gpu-poor, published and not measured here": f"{share:.0%} of the bytes, {ratio:.2f}x fp32"}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_peers", description=__doc__)
    cases = [*SPEED, *QUALITY]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument(
        "--goals", action="store_true", help="of speed, only the rows that the goals are about: much shorter"
    )
    parser.add_argument("--replicates", type=int, default=3, help="processes of each stack")
    parser.add_argument(
        "--seconds", type=float, default=5, help="the least time that each process is measured"
    )
    parser.add_argument("--turns", type=int, default=9, help="requests of each peer that no backend runs")
    parser.add_argument("--sequences", type=int, default=8, help="of the cases of quality")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print this document of an earlier run as Markdown instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
