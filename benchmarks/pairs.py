"""Two variants side by side, as those of a ladder are measured."""

from contextlib import AbstractContextManager

from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.groups import Group
from optigpu.conductor.session import Session, open_session
from optigpu.documents.events import Event
from optigpu.documents.result import Result
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import REPLICATE, never
from optigpu.vocabulary import OptiGPUError


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


def session_of(spec: JobSpec, variants: int) -> AbstractContextManager[Session]:
    """A session for so many variants, set up as a run does, without its time limit."""
    return open_session(spec, range(variants), _silent, program=REPLICATE, cancelled=never)


def _silent(_: Event) -> None:
    """Ignores events."""
