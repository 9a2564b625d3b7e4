"""`python -m benchmarks.repeatability`: how pairs are decided that are the same, and pairs of which one takes longer.

Each pair is measured side by side, each side with its own processes, and its time of a request is compared as that of
two results of one job is. Of the pairs that are the same, both sides run one variant; of the others the second one
generates 5% more tokens. Goals for 100 pairs: of those that are the same at most 8 different and at least 60
equivalent, of the others at least 80 different. All decisions, warnings and reasons are printed.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.document import write
from benchmarks.pairs import measure_pair
from optigpu.documents.result import Result
from optigpu.documents.views import Decision, MetricComparison
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.report import console
from optigpu.statistics.compare import compare
from optigpu.vocabulary import DeviceKind

METRIC = "latency_s"
"""The time of a request: the tokens/s of a longer request are those of a shorter one."""
LONGER = 0.05
Pair = tuple[Result, Result]


def main() -> int:
    """Measures the pairs and prints what they show."""
    options = _options()
    device = options.device or (DeviceKind.CUDA if probe().has(DeviceKind.CUDA) else DeviceKind.CPU)
    same, longer = (
        spec_of(options.model, device, options.replicates, options.seconds, tokens)
        for tokens in (options.tokens, round(options.tokens * (1 + LONGER)))
    )
    found: dict[str, list[Pair]] = {"same": [], "longer": []}
    ends = time.monotonic() + 60 * options.minutes
    for kind in _turns(options.pairs, ends):
        found[kind].append(measure_pair(same, longer if kind == "longer" else None))
        if options.output:
            # After each pair: an hour's figures should not be lost with its last minute.
            figures = {kind: figures_of(pairs) for kind, pairs in found.items()}
            write(options.output, "repeatability", {"spec": same.model_dump(mode="json"), **figures})
    for kind, pairs in found.items():
        console().print(text_of(kind, figures_of(pairs)))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeatability", description=__doc__)
    parser.add_argument("--pairs", type=int, default=100, help="of each kind")
    parser.add_argument("--minutes", type=float, default=240.0, help="no pair begins later than that")
    parser.add_argument("--replicates", type=int, default=5)
    parser.add_argument("--model", default="preset:tiny-llama-test")
    parser.add_argument("--tokens", type=int, default=60, help="that a request generates")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed requests for each process")
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind))
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


def _turns(pairs: int, ends: float) -> Iterator[str]:
    """The kinds in turns, until there are enough pairs of each or the time is up."""
    for _ in track(range(pairs), "pairs", console=console(stderr=True)):
        for kind in ("same", "longer"):
            if time.monotonic() > ends:
                return
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


def compared(pair: Pair) -> MetricComparison:
    """A pair's time of a request, compared as two stored results."""
    first, second = (result.model_dump(mode="json") for result in pair)
    return compare(first, second, anyway=True).metrics[METRIC]


def figures_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What each pair was called, its ratio, all warnings and reasons, and the variation between processes."""
    metrics = [compared(pair) for pair in pairs]
    decisions = Counter(str(metric.decision) for metric in metrics)
    results = [result for pair in pairs for result in pair]
    variations = [result.metrics[METRIC].cv_between for result in results]
    ratios = [metric.ratio for metric in metrics if metric.ratio is not None]
    return {
        "pairs": len(pairs),
        "paired": sum(metric.paired for metric in metrics),
        "decisions": {str(decision): decisions[decision] for decision in Decision},
        "different": decisions[Decision.BETTER] + decisions[Decision.WORSE],
        "ratio_mean": statistics.geometric_mean(ratios) if ratios else None,
        "ratios": ratios,
        "intervals": [metric.ci for metric in metrics],
        "cv_between_median": statistics.median(each for each in variations if each is not None)
        if any(each is not None for each in variations)
        else None,
        "results": len(results),
        "invalid": dict(Counter(str(reason) for each in results for reason in each.verdict.reasons)),
        "warnings": dict(Counter(str(warning) for each in results for warning in each.verdict.warnings)),
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
            f"  decisions: {figures['decisions']}; compared in pairs of processes: {figures['paired']}",
            f"  ratio, mean: {'none' if mean is None else f'{mean:.4f}'}",
            f"  variation between processes, median: {'unknown' if variation is None else f'{variation:.2%}'}",
            f"  results called invalid, of {figures['results']}: {figures['invalid'] or 'none'}",
            f"  warnings: {figures['warnings'] or 'none'}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
