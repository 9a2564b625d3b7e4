"""`python -m benchmarks.vs_peers`: our stacks beside other ways to run the same model, in the same minutes.

Cases of speed (decode-gpt2, decode-llama-3.2-1b, prefill-gpt2) and of quality (quality-tiny). Subjects stand ready side
by side and take turns, a request each; figures are medians over the turns, ratios are taken turn by turn. The exit
status is 0 when every goal of the cases was reached.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.document import write
from benchmarks.peers import FP32, PEERS, PUBLISHED, Q4_0, Q4_K_M, Peer
from benchmarks.peers.arguments import default_cache
from benchmarks.turns import Case, Figures, Stack, measure
from benchmarks.vs_cases import ALONE, COMPILED, OURS, QUALITY, SPEED, Speed, quality_goal, speed_goals
from benchmarks.vs_quality import measured
from benchmarks.vs_tables import markdown
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
            name: speed(SPEED[name], options.turns, options.cache) for name in SPEED if name in options.cases
        },
        "quality": quality(options.sequences, options.cache) if QUALITY in options.cases else None,
    }
    document["goals"] = goals(document)
    print(markdown(document))
    if options.output:
        write(options.output, "vs_peers", document)
    return 0 if all(goal["reached"] for goal in document["goals"]) else 1


def speed(speed: Speed, turns: int, cache: Path) -> dict[str, Any]:
    """The lines of a case, the peer first that the others are divided by; that is fp32 where llama.cpp is missing."""
    case = replace(speed.case, cache=cache)
    about = {"case": asdict(case) | {"cache": None}, "turns": turns, "published": _published(case)}
    reference = Q4_0 if Q4_0.missing() is None else FP32
    others = [subject for subject in (Q4_0, *speed.subjects) if subject != reference]
    try:
        lines = in_groups(reference, others, case, turns, speed.at_once)
    except OptiGPUError as error:
        return about | {"reason": str(error)}
    named = [asdict(Figures(name, reason=why)) for name, why in speed.left_out.items()]
    return about | {"lines": lines + named}


def in_groups(
    reference: Peer, others: Sequence[Stack | Peer], case: Case, turns: int, at_once: int
) -> list[dict[str, Any]]:
    """Groups of `at_once` with the reference beside each; its own figures are those of the first group."""
    lines: list[dict[str, Any]] = []
    for group, start in enumerate(range(0, len(others), at_once)):
        found = measure([reference, *others[start : start + at_once]], case, turns)
        lines += [
            asdict(figures) | {"ratio": figures.ratio, "rate": figures.rate, "group": group}
            for figures in (found[1:] if lines else found)
        ]
    return lines


def quality(sequences: int, cache: Path) -> dict[str, Any]:
    """Every peer's and every stack's divergence from the fp32 model."""
    return measured([*OURS, *ALONE, COMPILED, *PEERS], Q4_0, sequences, cache)


def goals(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the cases that were measured."""
    found: list[dict[str, Any]] = []
    for name, case in document["speed"].items():
        if "reason" in case:
            found.append({"goal": f"{name}: not measured", "reached": False})
        else:
            found += speed_goals(name, case["lines"])
    if document["quality"]:
        found.append(quality_goal(document["quality"]["lines"], Q4_0.name, Q4_K_M.name))
    return found


def _published(case: Case) -> dict[str, str]:
    if case.preset not in PUBLISHED or case.measure != "decode":
        return {}
    share, ratio = PUBLISHED[case.preset]
    return {"gpu-poor, published and not measured here": f"{share:.0%} of the bytes, {ratio:.2f}x fp32"}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_peers", description=__doc__)
    cases = [*SPEED, QUALITY]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--turns", type=int, default=9, help="requests of each subject")
    parser.add_argument("--sequences", type=int, default=8, help=f"of the case {QUALITY}")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where GGUF files are kept")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print this document of an earlier run as Markdown instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
