"""Predicts what training needs of a GPU's memory, in a process that loads torch and holds the CPU as a job does."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from optigpu import paths
from optigpu.child.messages import PredictTraining, TrainingPredicted
from optigpu.conductor.processes.asking import TimedWatch, ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.locks import hold
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.session import environment_for
from optigpu.fit.training import FitOfTraining, TrainingAsked, fit_of
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind

PREDICTOR = (sys.executable, "-P", "-m", "optigpu.child.training_memory")
"""The program that predicts. -P keeps files of the working directory from being taken for modules."""
LIMIT_S = 600.0
"""A step of eight billion parameters takes seconds on tensors without numbers."""


def fit_training(
    asked: TrainingAsked,
    stacks: Sequence[tuple[Technique, ...]],
    doing: Callable[[str], None],
    cancelled: Callable[[], str | None],
    *,
    program: Sequence[str] = PREDICTOR,
    lock_dir: Path | None = None,
) -> FitOfTraining:
    """Predicts every stack. `doing` is told what goes on, and `cancelled` asked for a reason to stop.

    Raises ReplicateError if the predicting process fails, OverdueError after ten minutes, and CancelledError.
    """
    environment = environment_for(DeviceKind.CPU)
    overdue = (
        f"The prediction had not ended after {LIMIT_S:g} s; ask for fewer stacks, or for a smaller model."
    )
    watch = TimedWatch(LIMIT_S, cancelled, overdue, doing)

    def wait() -> None:
        doing("waiting for the CPU, which a job uses")
        watch.check()

    order = PredictTraining(model=asked.model, stacks=tuple(stacks), workloads=asked.workloads)
    with (
        hold(lock_dir or paths.lock_dir(), DeviceKind.CPU, environment, wait) as descriptors,
        Child(program, child_variables(environment.cpu_cores), keep=descriptors) as child,
    ):
        doing("predicting a step of training with each stack")
        return fit_of(asked, stacks, ask(child, order, TrainingPredicted, watch).stacks)
