"""Makes smaller models and predicts what training needs, in processes that hold the CPU as a job does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from optigpu import paths
from optigpu.child.messages import PredictTraining, RecipeMade, RunRecipe, TrainingPredicted
from optigpu.conductor.processes.child import TASKS, Child, TimedWatch, ask
from optigpu.conductor.processes.locks import hold
from optigpu.conductor.processes.variables import PATIENT, child_variables
from optigpu.conductor.session import environment_for
from optigpu.fit.memory import FitOfTraining, TrainingAsked, fit_of
from optigpu.recipes.request import RecipeOutcome, RecipeRequest, check_output
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind

PREDICTION_S = 600.0
"""A step of eight billion parameters takes seconds on tensors without numbers."""


def make_smaller(
    request: RecipeRequest,
    doing: Callable[[str], None],
    cancelled: Callable[[], str | None],
    limit_s: float,
    *,
    program: Sequence[str] = TASKS,
) -> RecipeOutcome:
    """Makes the model. `doing` is told what goes on, and `cancelled` asked for a reason to stop. Raises SpecError for
    a folder that cannot be written, UnsupportedError for a model that cannot be made smaller so, ReplicateError if a
    loss is not finite or the process fails, OverdueError after `limit_s`, and CancelledError."""
    check_output(request.output)
    overdue = (
        f"The recipe had not ended after {limit_s:g} s, and nothing was written; ask for fewer steps, or raise "
        "--timeout."
    )
    watch = TimedWatch(limit_s, cancelled, overdue, doing)
    resolved = request.model_copy(update={"output": request.output.resolve()})
    with _holding_the_cpu(program, watch, PATIENT) as (child, threads):
        return ask(child, RunRecipe(request=resolved, threads=threads), RecipeMade, watch).outcome


def fit_training(
    asked: TrainingAsked,
    stacks: Sequence[tuple[Technique, ...]],
    doing: Callable[[str], None],
    cancelled: Callable[[], str | None],
    *,
    program: Sequence[str] = TASKS,
) -> FitOfTraining:
    """Predicts every stack. `doing` is told what goes on, and `cancelled` asked for a reason to stop. Raises
    ReplicateError if the predicting process fails, OverdueError after ten minutes, and CancelledError."""
    overdue = f"The prediction had not ended after {PREDICTION_S:g} s; ask for fewer stacks, or for a smaller model."
    watch = TimedWatch(PREDICTION_S, cancelled, overdue, doing)
    order = PredictTraining(model=asked.model, stacks=tuple(stacks), workloads=asked.workloads)
    with _holding_the_cpu(program, watch) as (child, _):
        doing("predicting a step of training with each stack")
        return fit_of(asked, stacks, ask(child, order, TrainingPredicted, watch).stacks)


@contextmanager
def _holding_the_cpu(
    program: Sequence[str], watch: TimedWatch, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Child, int]]:
    """A process with `more` variables, and how many threads it has."""
    environment = environment_for(DeviceKind.CPU)
    threads = environment.cpu_cores

    def wait() -> None:
        watch.show("waiting for the CPU, which a job uses")
        watch.check()

    with (
        hold(paths.lock_dir(), DeviceKind.CPU, environment, wait) as descriptors,
        Child(program, {**child_variables(threads), **more}, keep=descriptors) as child,
    ):
        yield child, threads
