"""`python -m benchmarks.vs_peers`: our stacks beside other ways to run the same model, in the same minutes.

Cases of quality (quality-tiny, quality-small) and of speed (decode-gpt2, prefill-gpt2, and llama-3.2-1b for both of a
Llama). What a backend runs is measured by jobs, each with llama.cpp Q4_0 and the goals' stack in it, whose processes
take turns: rows have intervals and verdicts. What no backend runs takes turns with these two, a request each.

Before the first run, --convert writes the files that engines read and compiles what is kept. A whole run takes at most
40 minutes on two cores, and one with --goals, of the rows alone that goals are about, at most 20: jobs have their time,
and what is whole by then is kept. A run on a machine that others use is to be repeated: its figures are not written to
--output. The exit status is 0 when every goal was reached, 1 when one was not, and 2 when the run is to be repeated.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.document import write
from benchmarks.engines import convert
from benchmarks.peers import PUBLISHED, Peer
from benchmarks.stacks import Q4_0, Case, Stack, details_of, spec_of
from benchmarks.turns import Figures, measure
from benchmarks.vs_cases import (
    ALONE,
    BF16,
    COMPILED,
    ELSEWHERE,
    ENGINES,
    FP32,
    IN_GOALS,
    KIN,
    OURS,
    QUALITY,
    SPEED,
    TIMED,
    Speed,
    name_of,
)
from benchmarks.vs_goals import counting, quality_goal, speed_goals
from benchmarks.vs_jobs import measured as measured_jobs
from benchmarks.vs_quality import measured
from optigpu.backends import BACKENDS
from optigpu.documents.events import as_document
from optigpu.documents.result import VerdictReason
from optigpu.hardware import probe
from optigpu.report import console
from optigpu.report.progress import RunProgress
from optigpu.vocabulary import OptiGPUError

Line = dict[str, Any]
BUSY = 0.25
"""Share of the cores that others may use before a run; who waits for threads by spinning suffers most from them."""


def markdown(document: dict[str, Any]) -> str:
    """Every case's table, how the peers were built, and the goals."""
    quality = document["quality"]
    parts = [_speed(name, case, quality) for name, case in document["speed"].items()]
    parts += [_quality(name, case) for name, case in quality.items()]
    parts += [_built(document), _goals(document["goals"])]
    load, cores = document["load_before"], document["cores"]
    if load > BUSY * cores:
        parts.insert(
            0,
            f"**Others used this machine: a load of {load:.1f} on {cores} cores before the run. Ratios mean little.**",
        )
    return "\n\n".join(parts)


def _speed(name: str, case: dict[str, Any], quality: dict[str, Any]) -> str:
    what = case["case"]
    kin = KIN[what["preset"]]
    lines = quality.get(kin, {"lines": ()})["lines"]
    divergences = {line["name"]: line.get("kld_mean") for line in lines}
    shape = f"{what['prompt_tokens']} tokens" + (f" + {what['new_tokens']}" if what["new_tokens"] else "")
    # A document of before jobs has turns alone.
    how = f"{case['measure']['replicates']} processes" if "measure" in case else f"{case['turns']} turns"
    title = f"### {name}: `preset:{what['preset']}`, batch 1, {shape}, {how}"
    if "reason" in case:
        return f"{title}\n\nNot measured: {case['reason']}"
    reference = case["lines"][0]
    headings = (
        "what",
        "tokens/s",
        f"x {reference['name']}",
        "95% interval",
        "MB",
        f"KLD on `{QUALITY[kin]}`",
    )
    rows = [_speed_row(line, divergences.get(line["name"])) for line in case["lines"]]
    rows += [(name, "", text, "", "", "") for name, text in case["published"].items()]
    return f"{title}\n\n{_table(headings, rows)}"


def _speed_row(line: Line, divergence: float | None) -> Sequence[str]:
    if line["reason"]:
        return (line["name"], "", _reason(line), "", "", "")
    ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
    figures = (f"{line['rate']:.1f}", ratio, _spread(line), _megabytes(line))
    return (line["name"], *figures, "" if divergence is None else f"{divergence:.5f}")


def _spread(line: Line) -> str:
    """The ratio's interval with what is wrong with the result; of a peer in turns the lowest and the highest ratio."""
    if "ratios" in line:
        return f"{min(line['ratios']):.2f}..{max(line['ratios']):.2f} of {len(line['ratios'])} turns"
    bounds = line["ratio_interval"]
    marks = [f"NOT valid: {', '.join(line['verdict'])}"] if line["verdict"] else []
    return "; ".join(
        ([f"{bounds[0]:.2f}..{bounds[1]:.2f}"] if bounds else []) + marks + list(line["warnings"])
    )


def _quality(name: str, quality: dict[str, Any]) -> str:
    title = (
        f"### {name}: `{quality['model']}` against its fp32 self, {quality['sequences']} x "
        f"{quality['length']} tokens, {quality['positions']} positions"
    )
    headings = ("what", "KLD", "99th percentile", "same top token", f"KLD - {quality['beside']}'s", "MB")
    return f"{title}\n\n{_table(headings, [_quality_row(line) for line in quality['lines']])}"


def _quality_row(line: Line) -> Sequence[str]:
    if "reason" in line:
        return (line["name"], _reason(line), "", "", "", "")
    beside = line.get("beside")
    return (
        line["name"],
        f"{line['kld_mean']:.5f} ± {line['kld_standard_error']:.5f}",
        f"{line['kld_p99']:.4f}",
        f"{line['top1_agreement']:.1%}",
        f"{beside['difference']:+.5f} ± {beside['standard_error']:.5f}" if beside else "",
        _megabytes(line),
    )


def _built(document: dict[str, Any]) -> str:
    """The flags of each peer's process, and of which types the tensors of llama.cpp's files are."""
    flags: dict[str, list[str]] = {}
    files: list[str] = []
    for model, line in _lines_with_models(document):
        details = line.get("details") or {}
        if "flags" in details:
            text = f"{details['version']}, {details['threads']} threads, {details['flags']}"
            flags.setdefault(text, []).append(line["name"])
        if "tensor_types" in details:
            counts = ", ".join(f"{count} {kind}" for kind, count in details["tensor_types"].items())
            files.append(f"- {line['name']} of `{model}`: {counts}")
    rows = [f"- {'; '.join(dict.fromkeys(names))}: {text}" for text, names in flags.items()]
    return "\n".join(
        ["### How the peers were built, and their files' tensors", "", *rows, *dict.fromkeys(files)]
    )


def _lines_with_models(document: dict[str, Any]) -> Iterator[tuple[str, Line]]:
    for case in document["speed"].values():
        for line in case.get("lines", []):
            yield f"preset:{case['case']['preset']}", line
    for case in document["quality"].values():
        for line in case["lines"]:
            yield case["model"], line


def _goals(goals: Iterable[dict[str, Any]]) -> str:
    rows = [f"- {'reached' if goal['reached'] else 'NOT reached'}: {goal['goal']}" for goal in goals]
    return "\n".join(["### Goals", "", *rows])


def _reason(line: Line) -> str:
    """In one cell."""
    return " ".join(line["reason"].replace("|", "/").split())


def _megabytes(line: Line) -> str:
    return "" if line["weight_bytes"] is None else f"{line['weight_bytes'] / 1e6:.1f}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, marks, *rows))


QUALITY_OF_GOALS: tuple[Stack | Peer, ...] = (OURS[0], IN_GOALS, *ENGINES, *ELSEWHERE)
QUALITY_OF_ALL: tuple[Stack | Peer, ...] = (*OURS, *ALONE, COMPILED, FP32, BF16, *ENGINES, *ELSEWHERE)
TO_REPEAT = 2
"""The exit status of a run whose figures are not to be kept."""


def main() -> int:
    """Measures the cases that were asked for, converts, or shows a document."""
    options = _options()
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return 0
    if options.convert:
        problems = [problem for name in options.cases for problem in converted(name)]
        print("\n".join(problems) or "All engines have their files.")
        return 0
    document: dict[str, Any] = {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
    reasons = list(loaded(document))
    if not (reasons and options.output):
        document |= figures(options)
        print(markdown(document))
        reasons = list(loaded(document))
    if reasons:
        print(f"\nNothing is kept of this run: {' '.join(reasons)} Repeat it when nothing else runs.")
        return TO_REPEAT
    if options.output:
        write(options.output, "vs_peers", document)
    return 0 if all(goal["reached"] for goal in document["goals"]) else 1


def figures(options: argparse.Namespace) -> dict[str, Any]:
    """Of all cases. Those of quality come first: they say which peers count."""
    started = time.monotonic()
    subjects = QUALITY_OF_GOALS if options.goals else QUALITY_OF_ALL
    document: dict[str, Any] = {
        "quality": {
            name: quality(model, subjects, options.sequences)
            for name, model in QUALITY.items()
            if name in options.cases
        },
        "speed": {},
    }
    for name, case in SPEED.items():
        if name in options.cases:
            asked = case.of_goals(counting(_kin(document, case.cases[0])) or ()) if options.goals else case
            document["speed"] |= speed(asked, measure_of(options, asked))
    return document | {"goals": goals(document), "seconds": time.monotonic() - started}


def converted(name: str) -> Iterator[str]:
    """Has every engine write its file of a case's model, and what is compiled be compiled; yields why one cannot."""
    if name in QUALITY:
        found = measured(QUALITY[name], ENGINES, Q4_0, sequences=1)
        yield from (f"{line['name']}: {line['reason']}" for line in found["lines"] if "reason" in line)
        return
    case = SPEED[name]
    kept = [each for each in case.stacks if each.backend != "torch" or each == COMPILED]
    yield from convert(spec_of([Q4_0, TIMED, *kept], case.cases[0]))


def measure_of(options: argparse.Namespace, speed: Speed) -> dict[str, Any]:
    """How the jobs measure."""
    return {
        "replicates": options.replicates or speed.replicates,
        "min_seconds": options.seconds,
        "max_seconds": 2 * options.seconds,
        "meters": ["latency", "memory"],
    }


def speed(speed: Speed, how: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The lines of each case, that first that the others are divided by; it is fp32 where llama.cpp is missing."""
    reference = FP32 if BACKENDS[Q4_0.backend].missing(probe()) else Q4_0
    stacks = speed.stacks if reference == Q4_0 else (Q4_0, *speed.stacks)
    about = {
        name_of(case): {
            "case": asdict(case),
            "measure": how,
            "turns": speed.turns,
            "published": _published(case),
        }
        for case in speed.cases
    }
    try:
        with RunProgress(console(stderr=True)) as progress:
            jobs = measured_jobs(
                reference,
                replace(speed, stacks=stacks),
                how,
                lambda event: progress.show(event.kind, as_document(event)),
            )
        specs = [spec.model_dump(mode="json") for spec in jobs.jobs]
        for case in speed.cases:
            lines = [asdict(line) for line in jobs.lines[name_of(case)]]
            lines += in_turns(reference, speed.elsewhere, case, speed.turns)
            lines += [_left_out(*each) for each in speed.left_out.items() if each[0] != reference.name]
            about[name_of(case)] |= {"lines": lines, "jobs": specs}
    except OptiGPUError as error:
        return {name: {"reason": str(error)} | each for name, each in about.items()}
    return about


def in_turns(reference: Stack, peers: Sequence[Peer], case: Case, turns: int) -> list[dict[str, Any]]:
    """What no backend runs, beside the reference and ours, turn by turn."""
    if not peers:
        return []
    _, ours, *theirs = measure([reference, TIMED, *peers], case, turns)
    return [_shown(each) | {"ours": ours.rates} for each in theirs]


def _shown(figures: Figures) -> dict[str, Any]:
    """With its turns instead of an interval, and no verdict."""
    return asdict(figures) | {
        "ratio": figures.ratio,
        "rate": figures.rate,
        "group": None,
        "ours": (),
        "ours_verdict": (),
        "verdict": (),
    }


def _left_out(name: str, why: str) -> dict[str, Any]:
    return _shown(Figures(name, reason=why)) | {"left_out": True}


def quality(model: str, subjects: Sequence[Stack | Peer], sequences: int) -> dict[str, Any]:
    """Every peer's and every stack's divergence from the fp32 model."""
    found = measured(model, subjects, Q4_0, sequences)
    for line in found["lines"]:
        if "recorded" in line.get("details", {}):
            line["details"] = details_of(line["details"])
    return found


def goals(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the cases that were measured."""
    found: list[dict[str, Any]] = []
    for name, case in document["speed"].items():
        if "reason" in case:
            found.append({"goal": f"{name}: not measured: {case['reason']}", "reached": False})
        else:
            found += speed_goals(name, case["lines"], _kin(document, Case(**case["case"])))
    return found + [quality_goal(name, case["lines"]) for name, case in document["quality"].items()]


def loaded(document: dict[str, Any]) -> Iterator[str]:
    """Why the figures are those of a machine that others used: a sentence each."""
    load, cores = document["load_before"], document["cores"]
    if load > BUSY * cores:
        yield f"Others used this machine, with a load of {load:.1f} on {cores} cores before the run."
    for name, case in document.get("speed", {}).items():
        for line in case.get("lines", ()):
            if VerdictReason.FOREIGN_PROCESS in line["verdict"]:
                yield f"{name}, {line['name']}: {' '.join(line['notes'])}"


def _kin(document: dict[str, Any], case: Case) -> list[dict[str, Any]]:
    """The lines of quality of the trained model of the same architecture; none if they were not measured."""
    lines: list[dict[str, Any]] = document["quality"].get(KIN[case.preset], {"lines": []})["lines"]
    return lines


def _published(case: Case) -> dict[str, str]:
    if case.preset not in PUBLISHED or case.measure != "decode":
        return {}
    share, ratio = PUBLISHED[case.preset]
    return {"gpu-poor, published and not measured here": f"{share:.0%} of the bytes, {ratio:.2f}x fp32"}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_peers", description=__doc__)
    cases = [*QUALITY, *SPEED]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument(
        "--convert", action="store_true", help="only write what the engines read, and compile"
    )
    parser.add_argument(
        "--goals", action="store_true", help="only the rows that the goals are about: at most 20 minutes"
    )
    parser.add_argument(
        "--replicates", type=int, help="processes of each stack (default: 3, of a Llama 2), as time allows"
    )
    parser.add_argument(
        "--seconds", type=float, default=2, help="the least time that each process is measured"
    )
    parser.add_argument("--sequences", type=int, default=8, help="of the cases of quality")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print this document of an earlier run as Markdown instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
