"""The same variant twice, side by side, as two variants of a ladder are measured."""

from collections.abc import Iterator
from contextlib import contextmanager

from optigpu import paths
from optigpu.conductor.preparation import Preparation, scratch_folder
from optigpu.conductor.processes.groups import Group
from optigpu.conductor.processes.locks import hold
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.session import Session, environment_for
from optigpu.documents.events import Event
from optigpu.documents.result import Result
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.run import REPLICATE, never
from optigpu.vocabulary import OptiGPUError


def measure_pair(spec: JobSpec) -> tuple[Result, Result]:
    """Two results of the one variant that `spec` stands for, their processes resident together, rounds in turns.

    Raises OptiGPUError when either could not be measured.
    """
    (variant,) = variants_of(spec)
    twins = [variant, variant.model_copy(update={"index": 1})]
    with session_of(spec, variants=2) as session:
        group = Group(session, twins)
        group.measure(Preparation(None))
    outcomes = group.outcomes
    first, second = (outcomes[index].result if index in outcomes else None for index in (0, 1))
    if group.waiting or first is None or second is None:
        reasons = "; ".join(outcome.reason for outcome in outcomes.values() if outcome.reason)
        raise OptiGPUError(f"The pair could not be measured side by side: {reasons or 'no memory for both'}.")
    return first, second


@contextmanager
def session_of(spec: JobSpec, variants: int) -> Iterator[Session]:
    """What a job's measuring processes share, set up as a run does, while the device is locked."""
    environment = environment_for(spec.device)
    progress = JobProgress(_silent, never, list(range(variants)), spec.measure.replicates)
    with (
        hold(paths.lock_dir(), spec.device, environment, progress.check) as descriptors,
        scratch_folder() as folder,
    ):
        yield Session(
            spec=spec,
            environment=environment,
            threads=environment.cpu_cores,
            program=REPLICATE,
            descriptors=descriptors,
            folder=str(folder),
            progress=progress,
            on_event=_silent,
        )


def _silent(_: Event) -> None:
    """Nobody listens."""
