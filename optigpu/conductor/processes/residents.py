"""Processes of several variants, resident side by side: made ready one by one, sampled in turns, metered one by one.

What changes on the machine while they are measured changes all of them alike, so their ratios stay what they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from optigpu.child.messages import Assignment, Ready
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.processes.capacity import Room
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.rounds import METERED, READY, Replicate, Sampling, audit, read_meters
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.progress import Watch
from optigpu.conductor.verdicts.host_monitor import Witness
from optigpu.documents.events import Event, VariantStarted
from optigpu.documents.result import Environment
from optigpu.job.spec import JobSpec, Variant
from optigpu.meters import METERS
from optigpu.vocabulary import ReplicateError, UnsupportedError

MOST_RESIDENT = 8
"""Variants side by side: a crash of the worker loses what has not ended, so it must not be all of a long job."""


@dataclass(frozen=True)
class Bench:
    """What all processes of a job share. `descriptors` are its locks, `folder` is its scratch directory."""

    spec: JobSpec
    environment: Environment
    threads: int
    program: tuple[str, ...]
    descriptors: tuple[int, ...]
    folder: str
    watch: Watch
    on_event: Callable[[Event], None]
    sessions: set[int] = field(default_factory=set)

    def assignment(self, variant: Variant, number: int) -> Assignment:
        """What a process of this variant is told first."""
        return Assignment(
            variant=variant,
            environment=self.environment,
            measure=self.spec.measure,
            seed=self.spec.seed,
            replicate=number,
            folder=self.folder,
            threads=self.threads,
        )

    @contextmanager
    def child(self) -> Iterator[Child]:
        """A new process, known as one of ours while it lives."""
        with Child(self.program, child_variables(self.threads), keep=self.descriptors) as child:
            self.sessions.add(child.pid)
            try:
                yield child
            finally:
                self.sessions.discard(child.pid)


@dataclass(frozen=True)
class Turn:
    """What came of one turn: a replicate or an error for each variant that took part, by its index.

    `waiting` are the variants that no memory was left for; none of them was started.
    """

    replicates: dict[int, Replicate]
    errors: dict[int, UnsupportedError | ReplicateError]
    waiting: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class _Resident:
    variant: Variant
    child: Child
    ready: Ready
    sampling: Sampling
    leave: ExitStack


def take_turns(bench: Bench, variants: Sequence[Variant], number: int, witness: Witness) -> Turn:
    """One replicate of each variant, all of them resident at once as far as the memory goes.

    Raises what the watch raises; no process is left behind then.
    """
    turn = Turn({}, {})
    with ExitStack() as everything:
        residents, waiting = _gather(bench, variants, number, witness, turn, everything)
        active = residents
        while active := [each for each in active if not each.sampling.is_over]:
            active = [each for each in active if _round(bench, each, number, turn)]
        for each in residents:
            if each.variant.index not in turn.errors:
                _examine(bench, each, number, turn)
            each.leave.close()
    return replace(turn, waiting=waiting)


def _gather(
    bench: Bench,
    variants: Sequence[Variant],
    number: int,
    witness: Witness,
    turn: Turn,
    everything: ExitStack,
) -> tuple[list[_Resident], tuple[Variant, ...]]:
    """Starts processes and makes them ready, until the variants or the memory are at an end."""
    residents: list[_Resident] = []
    room = Room(bench.spec.device, bench.environment)
    for position, variant in enumerate(variants):
        if residents and (len(residents) >= MOST_RESIDENT or not room.for_another()):
            return residents, tuple(variants[position:])
        if number == 0:
            bench.on_event(VariantStarted(index=variant.index))
        bench.watch.at(variant.index, number, "starting")
        bench.watch.toward(READY)
        leave = everything.enter_context(ExitStack())
        try:
            child = leave.enter_context(bench.child())
            assignment = bench.assignment(variant, number)
            with bench.watch.half_of_what_is_left("making it ready"):
                ready = ask(child, assignment, Ready, bench.watch)
        except (UnsupportedError, ReplicateError) as error:
            turn.errors[variant.index] = error
            leave.close()
            continue
        bench.watch.reached()
        room.taken_by(child.pid)
        sampling = Sampling(child, ready, assignment, witness)
        residents.append(_Resident(variant, child, ready, sampling, leave))
    return residents, ()


def _round(bench: Bench, resident: _Resident, number: int, turn: Turn) -> bool:
    """Whether it is still there after its round."""
    bench.watch.at(resident.variant.index, number, "measuring")
    try:
        resident.sampling.round(bench.watch)
    except ReplicateError as error:
        turn.errors[resident.variant.index] = error
        resident.leave.close()
        return False
    return True


def _examine(bench: Bench, resident: _Resident, number: int, turn: Turn) -> None:
    """What follows the timed rounds: fresh inputs, then the meters that this replicate is asked for."""
    index = resident.variant.index
    meters = [name for name in bench.spec.measure.meters if name != "latency"]
    asked = [name for name in meters if number == 0 or not METERS[name].once]
    bench.watch.at(index, number, "checking")
    bench.watch.toward(METERED)
    try:
        audited = audit(resident.child, resident.ready, bench.watch)
        metered = read_meters(resident.child, asked, bench.watch)
    except ReplicateError as error:
        turn.errors[index] = error
        return
    turn.replicates[index] = replace(resident.sampling.replicate(), audit=audited, metered=metered)
    bench.watch.finish()
