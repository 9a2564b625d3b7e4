"""`python -m benchmarks.repeatability`: how pairs are decided that are the same, and pairs of which one takes longer.

Each pair is measured side by side, each side with its own processes, and its time of a request is compared as that of
two results of one job is. Of the pairs that are the same, both sides run one variant; of the others the second one
generates 17 tokens instead of 16. Where the prompt takes as long as four tokens, its requests take 5% longer; the mean
of the ratios says how much longer they took. Pairs are independent of each other: `--resume` adds to those of an
earlier hour. Goals for 100 pairs: of those that are the same at most 8 different and at least 60 equivalent, of the
others at least 80 different. All decisions, warnings and reasons are printed.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.document import measured_before, write
from benchmarks.jobs import session_of
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.groups import Group
from optigpu.documents.result import Result
from optigpu.documents.views import Decision
from optigpu.hardware import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.report.formats import console
from optigpu.statistics.compare import compare
from optigpu.vocabulary import DeviceKind, OptiGPUError

METRIC = "latency_s"
"""The time of a request: the tokens/s of a longer request are those of a shorter one."""
LONGER = 0.05
KINDS = ("same", "longer")


@dataclass(frozen=True)
class Pair:
    """What one pair was called, by which ratio, and what stood against its two results."""

    kind: str
    at: str
    hardware: str
    commit: str | None
    decision: str
    ratio: float | None
    ci: tuple[float, float] | None
    paired: bool
    cv_between: tuple[float | None, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, first: Result, second: Result) -> "Pair":
        """The pair's time of a request, compared as two stored results."""
        documents = [result.model_dump(mode="json") for result in (first, second)]
        metric = compare(*documents, anyway=True).metrics[METRIC]
        verdicts = [result.verdict for result in (first, second)]
        return cls(
            kind=kind,
            at=first.created_at.isoformat(),
            hardware=first.environment.hardware_class,
            commit=first.environment.git_revision,
            decision=str(metric.decision),
            ratio=metric.ratio,
            ci=metric.ci,
            paired=metric.paired,
            cv_between=tuple(result.metrics[METRIC].cv_between for result in (first, second)),
            reasons=tuple(str(reason) for verdict in verdicts for reason in verdict.reasons),
            warnings=tuple(str(warning) for verdict in verdicts for warning in verdict.warnings),
        )


def main() -> int:
    """Measures the pairs and prints what they show."""
    options = _options()
    device = options.device or (DeviceKind.CUDA if probe().has(DeviceKind.CUDA) else DeviceKind.CPU)
    same, longer = (
        spec_of(options.model, device, options.replicates, options.seconds, tokens)
        for tokens in (options.tokens, round(options.tokens * (1 + LONGER)))
    )
    spec = same.model_dump(mode="json")
    try:
        pairs = pairs_of(measured_before(options.output, spec, "measured")) if options.resume else []
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    ends = time.monotonic() + 60 * options.minutes
    for kind in _turns(options.pairs, [pair.kind for pair in pairs], ends):
        pairs.append(Pair.of(kind, *measure_pair(same, longer if kind == "longer" else None)))
        if options.output:
            # After each pair: an hour's figures should not be lost with its last minute.
            figures = {kind: figures_of(pairs, kind) for kind in KINDS}
            measured = [asdict(pair) for pair in pairs]
            write(options.output, "repeatability", {"spec": spec, **figures, "measured": measured})
    for kind in KINDS:
        console().print(text_of(kind, figures_of(pairs, kind)))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeatability", description=__doc__)
    parser.add_argument("--pairs", type=int, default=100, help="of each kind")
    parser.add_argument("--minutes", type=float, default=240.0, help="no pair begins later than that")
    parser.add_argument("--replicates", type=int, default=5)
    parser.add_argument("--model", default="preset:tiny-llama-test")
    parser.add_argument("--tokens", type=int, default=16, help="that a request generates")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed requests for each process")
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind))
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--resume", action="store_true", help="go on with the pairs of the file of --output")
    return parser.parse_args()


def pairs_of(documents: Iterable[dict[str, Any]]) -> list[Pair]:
    """The pairs of a file."""
    return [Pair(**{**each, "ci": each["ci"] and tuple(each["ci"])}) for each in documents]


def _turns(count: int, done: Sequence[str], ends: float) -> Iterator[str]:
    """The kinds in turns, until there are `count` pairs of each or the time is up."""
    left = {kind: count - done.count(kind) for kind in KINDS}
    for turn in track(range(max(left.values())), "pairs", console=console(stderr=True)):
        for kind in KINDS:
            if time.monotonic() > ends:
                return
            if turn < left[kind]:
                yield kind


def spec_of(model: str, device: DeviceKind, replicates: int, seconds: float, tokens: int) -> JobSpec:
    """The one variant that is measured again and again."""
    measure = {
        "replicates": replicates,
        "min_seconds": seconds,
        "max_seconds": 4 * seconds,
        "rel_ci": 0.02,
        "meters": ["latency"],
    }
    workload = {"kind": "generate", "prompt_tokens": 8, "new_tokens": tokens}
    document = {"workload": workload, "model": model, "device": device, "measure": measure}
    return JobSpec.model_validate(document)


def measure_pair(spec: JobSpec, other: JobSpec | None = None) -> tuple[Result, Result]:
    """Results of the one variant that `spec` stands for and of that of `other`, or of the same one twice.

    Their processes are resident together, rounds in turns. Raises OptiGPUError when either could not be measured.
    """
    (variant,), (twin,) = variants_of(spec), variants_of(other or spec)
    pair = [variant, twin.model_copy(update={"index": 1})]
    with session_of(spec, variants=2) as session:
        group = Group(session, pair)
        group.measure(Preparation(None))
    outcomes = group.outcomes
    first, second = (outcomes[index].result if index in outcomes else None for index in (0, 1))
    if group.waiting or not group.fit_together or first is None or second is None:
        reasons = "; ".join(outcome.reason for outcome in outcomes.values() if outcome.reason)
        raise OptiGPUError(f"The pair could not be measured side by side: {reasons or 'no memory for both'}.")
    return first, second


def figures_of(measured: Sequence[Pair], kind: str) -> dict[str, Any]:
    """How the pairs of a kind were decided, all warnings and reasons, and the variation between processes."""
    pairs = [pair for pair in measured if pair.kind == kind]
    decisions = Counter(pair.decision for pair in pairs)
    variations = [each for pair in pairs for each in pair.cv_between if each is not None]
    ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
    return {
        "pairs": len(pairs),
        "hardware": dict(Counter(pair.hardware for pair in pairs)),
        "paired": sum(pair.paired for pair in pairs),
        "decisions": {str(decision): decisions[decision] for decision in Decision},
        "different": decisions[Decision.BETTER] + decisions[Decision.WORSE],
        "ratio_mean": statistics.geometric_mean(ratios) if ratios else None,
        "cv_between_median": statistics.median(variations) if variations else None,
        "results": 2 * len(pairs),
        "invalid": dict(Counter(reason for pair in pairs for reason in pair.reasons)),
        "warnings": dict(Counter(warning for pair in pairs for warning in pair.warnings)),
    }


def text_of(kind: str, figures: dict[str, Any]) -> str:
    """The figures beside their goals."""
    of_pairs = f"of {figures['pairs']} pairs"
    goals = {
        "same": f"different {figures['different']} {of_pairs} (goal: at most 8%), equivalent "
        f"{figures['decisions']['equivalent']} (goal: at least 60%)",
        "longer": f"different {figures['different']} {of_pairs} (goal: at least 80%)",
    }
    variation, mean = figures["cv_between_median"], figures["ratio_mean"]
    return "\n".join(
        (
            f"{kind}: {goals[kind]}",
            f"  pairs on: {figures['hardware'] or 'none'}",
            f"  decisions: {figures['decisions']}; compared in pairs of processes: {figures['paired']}",
            f"  ratio, mean: {'none' if mean is None else f'{mean:.4f}'}",
            f"  variation between processes, median: {'unknown' if variation is None else f'{variation:.2%}'}",
            f"  results called invalid, of {figures['results']}: {figures['invalid'] or 'none'}",
            f"  warnings: {figures['warnings'] or 'none'}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
