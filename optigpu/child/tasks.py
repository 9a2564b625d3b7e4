"""python -m optigpu.child.tasks: does what the conductor asks for beside the measuring of variants.

It measures the machine's peak rates, proves that a device computes, makes smaller models, predicts what training needs
and runs checks of the self-test. It reads one task after the other from stdin, and answers as
`optigpu.child.connection` says.
"""

import gc
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, assert_never

from optigpu.backends import BACKENDS
from optigpu.backends.training import TrainingBatch
from optigpu.child.connection import Tell, broken, connect, raise_priority
from optigpu.child.messages import (
    TASK,
    Answer,
    AnyTask,
    Checked,
    Checks,
    ListChecks,
    PredictTraining,
    Progress,
    Proven,
    RecipeMade,
    Refused,
    RunCheck,
    RunPeaks,
    RunProof,
    RunRecipe,
    TrainingPredicted,
)
from optigpu.documents.facts import ImageFacts, ModelFacts
from optigpu.fit.memory import StackNeeds
from optigpu.job.spec import resolve
from optigpu.programs import ResidentProgram, programs_run_by
from optigpu.selftest.checks import all_checks, run_check
from optigpu.selftest.setting import PLAIN_BACKEND, Setting
from optigpu.techniques.base import Technique
from optigpu.vocabulary import SpecError, UnsupportedError
from optigpu.workloads.train_step import TrainStep


def main() -> NoReturn:
    """Answers each task, for ever: the thread that reads stdin ends the process."""
    lines, tell = connect()
    converters = ResidentProgram()
    while True:
        line = lines.get()
        try:
            tell(_done(TASK.validate_json(line), tell, converters))
        except UnsupportedError as error:
            tell(Refused(reason=str(error)))
        except Exception as error:
            tell(broken(error))


def _done(task: AnyTask, tell: Tell, converters: ResidentProgram) -> Answer:
    match task:
        case RunPeaks():
            # The torch backend measures them for variants of every backend: they are the machine's.
            BACKENDS["torch"].use_threads(task.threads)
            raise_priority()
            return BACKENDS["torch"].peaks(task.device, task.threads)
        case RunProof():
            try:
                from optigpu.backends.torch.device import multiply  # without torch that is an answer as well

                multiply(task.device)
            except Exception as error:  # its reader says it in one sentence, and needs no traceback
                return broken(error).model_copy(update={"trace": ""})
            return Proven()
        case RunRecipe():
            return _made(task, tell)
        case PredictTraining():
            needs = (_needs(task.model, stack, task.workloads) for stack in task.stacks)
            return TrainingPredicted(stacks=tuple(needs))
        case ListChecks():
            return Checks(checks=all_checks())
        case RunCheck():
            # A model is small here: each converter would take longer to start than to write it.
            with programs_run_by(converters.run):
                return _checked(task)
        case _:
            assert_never(task)


def _made(task: RunRecipe, tell: Tell) -> RecipeMade:
    BACKENDS[PLAIN_BACKEND].use_threads(task.threads)
    from optigpu.recipes.make import make  # a torch that cannot be loaded is an answer as well

    try:
        return RecipeMade(outcome=make(task.request, lambda doing: tell(Progress(doing=doing))))
    except SpecError as error:
        raise UnsupportedError(str(error)) from error


def _needs(model: str, stack: tuple[Technique, ...], workloads: Sequence[TrainStep]) -> StackNeeds:
    from optigpu.backends.torch.training_memory import predicted_need

    batches = tuple(partial(_batch, workload) for workload in workloads)
    try:
        found = predicted_need(workloads[0].update_rule, model, resolve(stack, "train_step"), batches)
    except UnsupportedError as error:
        return StackNeeds(reason=str(error))
    return StackNeeds(needs=tuple(found))


def _batch(workload: TrainStep, facts: ModelFacts | ImageFacts) -> TrainingBatch:
    return workload.draws(facts, 0)()


def _checked(task: RunCheck) -> Checked:
    for engine in filter(None, (task.check.backend, PLAIN_BACKEND)):
        BACKENDS[engine].use_threads(task.threads)
    found = run_check(
        task.check, Setting(task.environment, task.check.device, task.threads, Path(task.folder))
    )
    gc.collect()  # the models of this check, before the next one loads its own
    error = found.error if math.isfinite(found.error) else None
    return Checked(error=error, bound=found.bound, of=found.of, how=found.how)


if __name__ == "__main__":
    main()
