"""`python -m benchmarks.training`: what each technique of training buys, whatever the order of the stack.

One job with the plan `ablation` on a model of GPT-2's shapes: each technique alone, added to those before it, and left
out of the whole, with memory and loss equivalence. All variants take turns, so that ratios hold where speeds drift.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.document import write
from optigpu.cli.measuring import measure
from optigpu.cli.options import validated
from optigpu.documents.result import AttributionRow
from optigpu.job.spec import JobSpec
from optigpu.report.formats import console, terminal
from optigpu.report.ladder import ladder_grid

STACK = ("mixed_precision", "gradient_checkpointing", "fused_optimizer", "gradient_accumulation")
"""What runs on a CPU as well as on a GPU, in the order in which the column "added" adds it."""


def spec_of(arguments: argparse.Namespace) -> JobSpec:
    """The job. Raises SpecError for a technique that there is not, or that excludes another."""
    return validated(
        {
            "name": "benchmarks.training",
            "workload": {
                "kind": "train_step",
                "batch_size": arguments.batch_size,
                "sequence_tokens": arguments.sequence_tokens,
            },
            "model": arguments.model,
            "device": arguments.device,
            "plan": "ablation",
            "stack": [{"name": name} for name in arguments.stack.split(",")],
            "measure": {
                "replicates": arguments.replicates,
                "min_seconds": 5,
                "max_seconds": 30,
                "quality": {"steps": arguments.steps},
            },
            "limits": {"timeout_s": arguments.timeout_s},
        }
    )


def disagreements(rows: Sequence[AttributionRow]) -> list[tuple[str, float]]:
    """The techniques whose gain depends on where they stand: "added" over "left out", the furthest from 1 first."""
    added = {row.technique: row.added.ratio for row in rows if row.technique and row.added}
    left = {row.technique: row.left_out.ratio for row in rows if row.technique and row.left_out}
    found = [(name, added[name] / left[name]) for name in left if name in added]
    return sorted(found, key=lambda each: max(each[1], 1 / each[1]), reverse=True)


def main() -> int:
    """Measures, prints the table, and says where the order decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--model", default="preset:gpt2")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--stack", default=",".join(STACK), help="techniques, separated by commas")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-tokens", type=int, default=64)
    parser.add_argument("--replicates", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of training that are compared with fp32's"
    )
    parser.add_argument("--timeout-s", type=float, default=7200)
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    measured = measure(spec_of(arguments))
    attribution = measured.report.attribution
    grid = ladder_grid(f"Ablation of training, {arguments.model}", attribution, measured.document["results"])
    console().print(terminal(grid))
    for name, share in disagreements(attribution.rows):
        console().print(
            f"{name}: added to the rungs before it, it buys {share:.2f} times what leaving it out loses."
        )
    if arguments.output:
        write(arguments.output, "training", dict(measured.document))
    return measured.status


if __name__ == "__main__":
    sys.exit(main())
