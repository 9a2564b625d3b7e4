"""`python -m benchmarks.repeatability`: how often the same thing is called different, and how far processes differ.

Each pair is one variant measured twice, side by side, each with its own processes, and compared as two results are.
A pair is a false alarm when the comparison calls the primary metric better or worse. Goals: at most 8 of 100, and a
coefficient of variation between processes of at most 2% on a CPU and 1% on a GPU.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.document import write
from benchmarks.pairs import measure_pair
from optigpu.documents.result import Result
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.report import console
from optigpu.statistics.compare import compare
from optigpu.vocabulary import DeviceKind

GENERATE = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64}


def main() -> int:
    """Measures the pairs and prints what they show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeatability", description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--replicates", type=int, default=3)
    parser.add_argument("--model", default="preset:tiny-llama-test")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed requests for each process")
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind))
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    device = options.device or (DeviceKind.CUDA if probe().has(DeviceKind.CUDA) else DeviceKind.CPU)
    spec = spec_of(options.model, device, options.replicates, options.seconds)
    pairs: list[tuple[Result, Result]] = []
    for _ in track(range(options.pairs), "pairs", console=console(stderr=True)):
        pairs.append(measure_pair(spec))
        if options.output:
            # After each pair: an hour's figures should not be lost with its last minute.
            figures = {"spec": spec.model_dump(mode="json"), **figures_of(pairs)}
            write(options.output, "repeatability", figures)
    console().print(text_of(figures_of(pairs), device))
    return 0


def spec_of(model: str, device: DeviceKind, replicates: int, seconds: float) -> JobSpec:
    """The one variant that is measured again and again."""
    measure = {
        "replicates": replicates,
        "min_seconds": seconds,
        "max_seconds": 4 * seconds,
        "rel_ci": 0.02,
        "meters": ["latency"],
    }
    document = {"workload": GENERATE, "model": model, "device": device, "measure": measure}
    return JobSpec.model_validate(document)


def figures_of(pairs: list[tuple[Result, Result]]) -> dict[str, Any]:
    """False alarms, what each pair was called, and the variation between processes."""
    decisions: dict[str, int] = {}
    ratios, variations = [], []
    for first, second in pairs:
        compared = compare(first.model_dump(mode="json"), second.model_dump(mode="json"))
        primary = compared.metrics[compared.primary_metric]
        decisions[str(primary.decision)] = decisions.get(str(primary.decision), 0) + 1
        if primary.ratio is not None:
            ratios.append(primary.ratio)
        for result in (first, second):
            variation = result.metrics[result.variant.primary_metric].cv_between
            if variation is not None:
                variations.append(variation)
    invalid = [reason for pair in pairs for result in pair for reason in result.verdict.reasons]
    return {
        "pairs": len(pairs),
        "decisions": decisions,
        "false_alarms": sum(decisions.get(name, 0) for name in ("better", "worse")),
        "ratio_spread": statistics.stdev(ratios) if len(ratios) > 1 else None,
        "cv_between_median": statistics.median(variations) if variations else None,
        "invalid": {str(reason): invalid.count(reason) for reason in set(invalid)},
    }


def text_of(figures: dict[str, Any], device: DeviceKind) -> str:
    """The figures beside their goals."""
    goal = 0.01 if device is DeviceKind.CUDA else 0.02
    variation = figures["cv_between_median"]
    shown = "not known from single processes" if variation is None else f"{variation:.2%}"
    return "\n".join(
        (
            f"{figures['pairs']} pairs of the same variant: {figures['decisions']}",
            f"false alarms on the primary metric: {figures['false_alarms']} (goal: at most 8 of 100)",
            f"coefficient of variation between processes, median: {shown} (goal: {goal:.0%})",
            f"results called invalid: {figures['invalid'] or 'none'}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
