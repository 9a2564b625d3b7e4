"""`python -m benchmarks.checkpointing`: bytes that gradient checkpointing saves, and the time that it adds.

A plain step, one with full and one with selective checkpointing stand ready in three processes and take turns. Goals:
selective saves at least half of the bytes that full saves, for at most a third of its extra time. Bytes are counted
exactly; times are ratios to the plain step of the same turn, medians over the turns.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.document import write
from benchmarks.pairs import session_of
from benchmarks.turns import ROUND
from optigpu.child.messages import Metered, Ready, Round, RunMeter
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.session import Session
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.report import console

STACKS: Mapping[str, list[dict[str, Any]]] = {
    "plain": [],
    "full": [{"name": "gradient_checkpointing"}],
    "selective": [{"name": "gradient_checkpointing", "mode": "selective"}],
}
BYTES, EXTRA = 1 / 2, 1 / 3
"""The least share of the bytes that full checkpointing saves, and the most of the time that it adds."""


@dataclass(frozen=True)
class Figures:
    """What the three came to: peak bytes of a step, and seconds of each turn's."""

    peak_bytes: Mapping[str, float]
    step_s: Mapping[str, Sequence[float]]

    @property
    def saved(self) -> float:
        """The share of the bytes that full saves which selective saves as well."""
        plain, full, selective = (self.peak_bytes[name] for name in STACKS)
        return (plain - selective) / (plain - full)

    def extra(self, name: str) -> float:
        """By what share of the plain step a step is longer, the median over the turns."""
        pairs = zip(self.step_s[name], self.step_s["plain"], strict=True)
        return statistics.median(mine / plain - 1 for mine, plain in pairs)

    @property
    def extra_share(self) -> float:
        """The share of the time that full adds which selective adds."""
        return self.extra("selective") / self.extra("full")

    @property
    def goals(self) -> Iterable[tuple[str, bool]]:
        """Each goal with its figure, and whether it was reached."""
        yield f"{self.saved:.0%} of the bytes (at least {BYTES:.0%})", self.saved >= BYTES
        yield f"{self.extra_share:.0%} of the extra time (at most {EXTRA:.0%})", self.extra_share <= EXTRA


def measured(model: str, workload: Mapping[str, object], turns: int) -> Figures:
    """The figures of one model. Raises OptiGPUError when one of the three cannot be measured."""
    specs = {name: _spec(model, workload, stack) for name, stack in STACKS.items()}
    with ExitStack() as leave:
        session = leave.enter_context(session_of(specs["plain"], variants=len(specs)))
        ready = {name: leave.enter_context(_child(session, spec)) for name, spec in specs.items()}
        for name, child in ready.items():
            (variant,) = variants_of(specs[name])
            ask(child, session.assignment(variant, 0), Ready, session.progress)
        peaks = {name: _peak(session, child) for name, child in ready.items()}
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in track(range(turns), "taking turns", console=console(stderr=True)):
            for name, child in ready.items():
                times[name] += ask(child, ROUND, Round, session.progress).samples["step_s"]
    return Figures(peaks, times)


def _spec(model: str, workload: Mapping[str, object], stack: list[dict[str, Any]]) -> JobSpec:
    step: dict[str, object] = {"kind": "train_step", **workload}
    return JobSpec.model_validate({"workload": step, "model": model, "stack": stack})


def _child(session: Session, spec: JobSpec) -> Any:
    (variant,) = variants_of(spec)
    return session.child(variant)


def _peak(session: Session, child: Child) -> float:
    return ask(child, RunMeter(meter="memory"), Metered, session.progress).values["peak_bytes"]


def main() -> int:
    """Measures; the exit status is 0 when both goals were reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpointing", description=__doc__)
    parser.add_argument("--model", default="preset:gpt2")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=7, help="steps of each of the three")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    # SGD keeps no state, so that the peak is where the activations are and not in the update.
    workload = {
        "batch_size": options.batch_size,
        "sequence_tokens": options.sequence_tokens,
        "optimizer": "sgd",
    }
    figures = measured(options.model, workload, options.turns)
    for name in STACKS:
        peak = f"{figures.peak_bytes[name] / 1e6:.0f} MB"
        console().print(f"{name}: peak {peak}, {figures.extra(name):+.1%} of the plain step's time")
    for text, met in figures.goals:
        console().print(f"{'reached' if met else 'NOT reached'}: {text}", markup=False)
    if options.output:
        shape = {"model": options.model, "workload": workload}
        write(options.output, "checkpointing", shape | asdict(figures))
    return 0 if all(met for _, met in figures.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
