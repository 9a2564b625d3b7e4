"""`python -m benchmarks.vs_peers`: our stacks beside other ways to run the same model, in the same minutes.

Cases of quality (quality-tiny, quality-small) and of speed (decode-gpt2, prefill-gpt2, and llama-3.2-1b for both of a
Llama); of models that people use, which `optigpu models get` brings, both (quality-smollm2-135m, smollm2-135m, and the
same of gemma3-270m). All are measured by jobs, whose processes take turns: rows have intervals and verdicts. Each job
of speed has llama.cpp Q4_0 and the goals' stack in it. What no backend runs, as torchao's int8 and int4, has no row.

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
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.document import write
from benchmarks.jobs import TEXT, Line, convert, grid_of, measured, megabytes, run_shown
from benchmarks.stacks import (
    BF16,
    DYNAMIC_INT8,
    FP32,
    NF4,
    Q4_0,
    Case,
    details_of,
    measure_of,
    published,
    spec_of,
)
from benchmarks.vs_cases import (
    COMPILED,
    ENGINES,
    IN_GOALS,
    KIN,
    OURS,
    QUALITY,
    SPEED,
    TIMED,
    Speed,
)
from benchmarks.vs_goals import counting, quality_goal, speed_goals
from optigpu.backends import BACKENDS
from optigpu.documents.result import Outcome, VerdictReason
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.report.formats import Grid, columns
from optigpu.report.formats import markdown as grid_markdown
from optigpu.vocabulary import Document, OptiGPUError

BUSY = 0.25
"""Share of the cores that others may use before a run; who waits for threads by spinning suffers most from them."""
QUALITY_OF_GOALS = (FP32, IN_GOALS, *ENGINES, DYNAMIC_INT8, NF4, OURS[0])
QUALITY_OF_ALL = (*QUALITY_OF_GOALS, BF16, *OURS[2:], COMPILED)
QUALITY_S, SHORT_QUALITY_S = 300.0, 150.0
"""How long a job of quality may take, and in a run for the goals alone."""
SHAPE = (32, 64)
"""Tokens of the prompt and new ones in a job of quality; its windows are as long as both together."""
QUALITY_SECONDS = 0.2
"""The least time that a process is timed there, where speed does not count."""
TO_REPEAT = 2
"""The exit status of a run whose figures are not to be kept."""


def markdown(document: Document) -> str:
    """Every case's table, how the peers were built, and the goals."""
    quality = document["quality"]
    parts = [_speed(name, case, quality) for name, case in document["speed"].items()]
    parts += [_quality(name, case) for name, case in quality.items()]
    goals = [
        f"- {'reached' if goal['reached'] else 'NOT reached'}: {goal['goal']}" for goal in document["goals"]
    ]
    parts += [_built(document), "\n".join(["### Goals", "", *goals])]
    if document["speed"] and (load := load_of_others(document)):
        parts.insert(0, f"**Others used this machine: {load} before the run. Ratios mean little.**")
    return "\n\n".join(part.rstrip() for part in parts)


def _speed(name: str, case: Document, quality: Document) -> str:
    what, model = case["case"], _model(case["case"])
    kin = KIN[model]
    shape = f"{what['prompt_tokens']} tokens" + (f" + {what['new_tokens']}" if what["new_tokens"] else "")
    # A document of before jobs has turns alone.
    how = f"{case['measure']['replicates']} processes" if "measure" in case else f"{case['turns']} turns"
    title = f"### {name}: `{model}`, batch 1, {shape}, {how}"
    if "reason" in case:
        return f"{title}\n\nNot measured: {case['reason']}"
    lines = quality.get(kin, {"lines": ()})["lines"]
    divergences = {line["name"]: f"{line['kld_mean']:.5f}" for line in lines if "kld_mean" in line}
    grid = grid_of(case["lines"], f"KLD on `{QUALITY[kin]}`", divergences, case["published"])
    return f"{title}\n\n{grid_markdown(grid)}"


def _quality(name: str, quality: Document) -> str:
    """Of older documents as well, in which the fp32 model wrote the text itself."""
    of = (
        f"{quality['tokens']} tokens of {quality['text']}"
        if "text" in quality
        else f"{quality['sequences']} x {quality['length']} tokens, {quality['positions']} positions"
    )
    title = f"### {name}: `{quality['model']}` against its fp32 self, {of}"
    if "reason" in quality:
        return f"{title}\n\nNot measured: {quality['reason']}"
    headings = columns("what", "KLD:", "99th percentile:", "same top token:", "perplexity:", "MB:")
    grid = Grid("", headings, tuple(map(_quality_row, quality["lines"]))).without_empty_columns()
    return f"{title}\n\n{grid_markdown(grid)}"


def _quality_row(line: Document) -> tuple[str, ...]:
    if "reason" in line:
        return (line["name"], line["reason"], "", "", "", "")
    interval, error = line.get("kld_ci"), line["kld_standard_error"]
    spread = " [{:.5f}, {:.5f}]".format(*interval) if interval else f" ± {error or 0:.5f}"
    return (
        line["name"],
        f"{line['kld_mean']:.5f}{spread}",
        f"{line['kld_p99']:.4f}",
        f"{line['top1_agreement']:.1%}",
        f"{line['perplexity']:.2f}" if line.get("perplexity") else "",
        megabytes(line),
    )


def _built(document: Document) -> str:
    """The flags of each peer's process, and of which types the tensors of llama.cpp's files are."""
    flags: dict[str, list[str]] = {}
    files: list[str] = []
    cases = [(_model(case["case"]), case) for case in document["speed"].values()]
    cases += [(case["model"], case) for case in document["quality"].values()]
    for model, line in ((model, line) for model, case in cases for line in case.get("lines", [])):
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


def main() -> int:
    """Measures the cases that were asked for, converts, or shows a document."""
    options = _options()
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return 0
    if options.convert:
        return convert([to_convert(name) for name in options.cases])
    document: dict[str, Any] = {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
    timed = not SPEED.keys().isdisjoint(options.cases)
    reasons = list(loaded(document, timed=timed))
    if not (reasons and options.output):
        document |= figures(options)
        print(markdown(document))
        reasons = list(loaded(document, timed=timed))
    if reasons:
        print(f"\nNothing is kept of this run: {' '.join(reasons)} Repeat it when nothing else runs.")
        return TO_REPEAT
    if options.output:
        write(options.output, "vs_peers", document)
    return 0 if all(goal["reached"] for goal in document["goals"]) else 1


def figures(options: argparse.Namespace) -> dict[str, Any]:
    """Of all cases. Those of quality come first: they say which peers count."""
    started = time.monotonic()
    document: dict[str, Any] = {"quality": {}, "speed": {}}
    for name, model in QUALITY.items():
        if name in options.cases:
            document["quality"][name] = quality(model, options)
    for name, case in SPEED.items():
        if name in options.cases:
            asked = case.of_goals(counting(_kin(document, case.cases[0])) or ()) if options.goals else case
            how = measure_of(options.replicates or asked.replicates, options.seconds)
            document["speed"] |= speed(asked, how | {"max_seconds": 2 * options.seconds})
    return document | {"goals": goals(document), "seconds": time.monotonic() - started}


def to_convert(name: str) -> JobSpec:
    """The job whose processes write each engine's file of a case's model, calibrate what is kept, and compile."""
    if name in QUALITY:
        return spec_of([FP32, *ENGINES, *OURS], QUALITY[name], SHAPE)
    case = SPEED[name]
    kept = [each for each in case.stacks if each.backend != "torch" or each == COMPILED]
    return spec_of([Q4_0, TIMED, *kept], case.cases[0].model, case.cases[0].shape)


def speed(speed: Speed, how: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The lines of each case, that first that the others are divided by; it is fp32 where llama.cpp is missing."""
    reference = FP32 if BACKENDS[Q4_0.backend].missing(probe()) else Q4_0
    others = [stack for stack in (Q4_0, *speed.stacks) if stack != reference]
    about: dict[str, dict[str, Any]] = {
        case.name: {
            "case": asdict(case),
            "measure": how,
            "published": published(case.model) if case.measure == "decode" else {},
        }
        for case in speed.cases
    }
    try:
        found = measured(speed.cases, (reference, TIMED), others, speed.at_once, speed.budget_s, how)
    except OptiGPUError as error:
        return {name: {"reason": str(error)} | each for name, each in about.items()}
    left_out = [
        Line(name, reason=why, left_out=True)
        for name, why in speed.left_out.items()
        if name != reference.name
    ]
    for name, lines in found.lines.items():
        about[name]["lines"] = [asdict(line) for line in (*lines, *left_out)]
        about[name]["jobs"] = [spec.model_dump(mode="json") for spec in found.jobs]
    return about


def quality(model: str, options: argparse.Namespace) -> Document:
    """Every peer's and every stack's divergence from the fp32 model, by one job, which needs no quiet machine."""
    stacks = QUALITY_OF_GOALS if options.goals else QUALITY_OF_ALL
    limit_s = options.budget or (SHORT_QUALITY_S if options.goals else QUALITY_S)
    measure = measure_of(1, QUALITY_SECONDS, "quality", text=TEXT, tokens=options.tokens)
    limits = {"timeout_s": limit_s, "max_variants": len(stacks), "wait_for_quiet_s": 0}
    about = {"model": model, "text": TEXT, "tokens": options.tokens}
    try:
        report = run_shown(spec_of(stacks, model, SHAPE, measure=measure, limits=limits))
    except OptiGPUError as error:
        return about | {"lines": [], "reason": str(error)}
    lines = [_divergence(stack.name, outcome) for stack, outcome in zip(stacks, report.outcomes, strict=True)]
    job = report.spec.model_dump(mode="json")
    hashes = {getattr(each.facts.quality, "dataset_sha256", None) for each in report.results} - {None}
    return about | {"text_sha256": next(iter(hashes), None), "lines": lines, "job": job}


def _divergence(name: str, outcome: Outcome) -> Document:
    """The figures of quality of a result, or the reason why there are none."""
    if outcome.result is None:
        return {"name": name, "reason": outcome.reason}
    metrics, facts = outcome.result.metrics, outcome.result.facts
    named = ("kld_mean", "kld_p99", "top1_agreement", "perplexity", "weight_bytes")
    values = {metric: metrics[metric].value for metric in named}
    if values["kld_mean"] is None:
        return {"name": name, "reason": metrics["kld_mean"].reason}
    error = getattr(facts.quality, "kld_standard_error", None)
    about = {"kld_ci": metrics["kld_mean"].ci, "kld_standard_error": error}
    return {"name": name, **values, **about, "details": details_of(facts.model_dump(mode="json"))}


def goals(document: Document) -> list[Document]:
    """Those of the cases that were measured."""
    found: list[Document] = []
    for name, case in document["speed"].items():
        if "reason" in case:
            found.append({"goal": f"{name}: not measured: {case['reason']}", "reached": False})
        else:
            found += speed_goals(name, case["lines"], _kin(document, Case(**case["case"])))
    return found + [quality_goal(name, case["lines"]) for name, case in document["quality"].items()]


def loaded(document: Document, *, timed: bool) -> Iterator[str]:
    """Why the figures are those of a machine that others used: a sentence each. Quality needs no quiet machine."""
    if timed and (load := load_of_others(document)):
        yield f"Others used this machine, with {load} before the run."
    for name, case in document.get("speed", {}).items():
        for line in case.get("lines", ()):
            if VerdictReason.FOREIGN_PROCESS in line["verdict"]:
                yield f"{name}, {line['name']}: {' '.join(line['notes'])}"


def load_of_others(document: Document) -> str | None:
    """The load before the run, where it was too high to time anything."""
    load, cores = document["load_before"], document["cores"]
    return f"a load of {load:.1f} on {cores} cores" if load > BUSY * cores else None


def _kin(document: Document, case: Case) -> list[Document]:
    """The lines of quality of the trained model of the same architecture; none if they were not measured."""
    lines: list[Document] = document["quality"].get(KIN[case.model], {"lines": []})["lines"]
    return lines


def _model(case: Document) -> str:
    """Documents of before trained models could be timed have the name of a preset."""
    return str(case["model"] if "model" in case else f"preset:{case['preset']}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_peers", description=__doc__)
    cases = [*QUALITY, *SPEED]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument(
        "--convert", action="store_true", help="only write what the engines read, and compile"
    )
    parser.add_argument(
        "--goals", action="store_true", help="only the rows that the goals are about: at most 35 minutes"
    )
    parser.add_argument(
        "--replicates", type=int, help="processes of each stack (default: 3, of a Llama 2), as time allows"
    )
    parser.add_argument(
        "--seconds", type=float, default=2, help="the least time that each process is measured"
    )
    parser.add_argument("--tokens", type=int, default=1000, help="of the text, in the cases of quality")
    parser.add_argument(
        "--budget",
        type=float,
        help=f"seconds that a job of quality may take (default: {QUALITY_S:g}, and {SHORT_QUALITY_S:g} with --goals)",
    )
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print this document of an earlier run as Markdown instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
