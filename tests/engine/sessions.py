"""A session with one of the children as its measuring process, and a memory rule that the test hands in."""

from collections.abc import Callable, Iterable
from pathlib import Path

from optigpu.conductor.processes.memory_budget import MakeMemoryRule
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.session import Session
from optigpu.documents.events import Event
from optigpu.documents.result import Environment
from optigpu.hardware.probe import probe
from optigpu.job.estimate import plan_time
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import DeviceKind
from tests.engine.processes import program

PLENTY = 100


class Space:
    """A memory rule for one turn: space for `processes` processes."""

    def __init__(self, processes: int) -> None:
        self._left = processes

    def add(self, pid: int) -> None:
        """One less."""
        self._left -= 1

    def has_space(self) -> bool:
        """Whether one is left."""
        return self._left > 0


def space_for(turns: Iterable[int]) -> MakeMemoryRule:
    """In each turn space for so many processes, in the turns after that for all."""
    left = iter(turns)

    def rule(device: DeviceKind, environment: Environment) -> Space:
        return Space(next(left, PLENTY))

    return rule


def session_with(
    spec: JobSpec,
    folder: Path,
    child: str,
    *arguments: object,
    space: Iterable[int] = (),
    cancelled: Callable[[list[Event]], str | None] = lambda _: None,
) -> tuple[Session, list[Event]]:
    """A session whose processes are `child`, and the list of the events that it will tell.

    `cancelled` says, by the events so far, why the job is cancelled.
    """
    events: list[Event] = []
    indexes = [variant.index for variant in variants_of(spec)]
    session = Session(
        spec=spec,
        environment=probe(),
        threads=1,
        program=program(child, *arguments),
        descriptors=(),
        folder=str(folder),
        progress=JobProgress(
            events.append,
            lambda: cancelled(events),
            indexes,
            spec.measure.replicates,
            guesses=plan_time(spec, variants_of(spec)).guesses,
            measure=spec.measure,
        ),
        on_event=events.append,
        memory_rule=space_for(space),
    )
    return session, events
