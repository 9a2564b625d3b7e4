"""Makes a smaller model in a process of its own, which holds the CPU as a job does."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from optigpu import paths
from optigpu.child.messages import RecipeMade, RunRecipe
from optigpu.conductor.processes.asking import TimedWatch, ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.locks import hold
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.session import environment_for
from optigpu.recipes.request import RecipeOutcome, RecipeRequest, check_output
from optigpu.vocabulary import DeviceKind

RECIPE = (sys.executable, "-P", "-m", "optigpu.child.recipe")
"""The program that makes models. -P keeps files of the working directory from being taken for modules."""
PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""A small model's threads wait for each other most of the time; nothing is timed here, so they need not spin."""


def make_smaller(
    request: RecipeRequest,
    doing: Callable[[str], None],
    cancelled: Callable[[], str | None],
    limit_s: float,
    *,
    program: Sequence[str] = RECIPE,
    lock_dir: Path | None = None,
) -> RecipeOutcome:
    """Makes the model. `doing` is told what goes on, and `cancelled` asked for a reason to stop.

    Raises SpecError for a folder that cannot be written, UnsupportedError for a model that cannot be made smaller so,
    ReplicateError if a loss is not finite or the process fails, OverdueError after `limit_s`, and CancelledError.
    """
    check_output(request.output)
    environment = environment_for(DeviceKind.CPU)
    watch = TimedWatch(
        limit_s,
        cancelled,
        f"The recipe had not ended after {limit_s:g} s, and nothing was written; ask for fewer steps, or raise "
        "--timeout.",
        doing,
    )

    def wait() -> None:
        doing("waiting for the CPU, which a job uses")
        watch.check()

    order = RunRecipe(
        request=request.model_copy(update={"output": request.output.resolve()}), threads=environment.cpu_cores
    )
    with (
        hold(lock_dir or paths.lock_dir(), DeviceKind.CPU, environment, wait) as descriptors,
        Child(program, child_variables(environment.cpu_cores) | PATIENT, keep=descriptors) as child,
    ):
        return ask(child, order, RecipeMade, watch).outcome
