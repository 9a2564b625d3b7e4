"""Measures a group of variants that fit into memory together, from the first replicate to their outcomes."""

from collections.abc import Callable, Sequence

from optigpu.conductor.outcome import evidence_of, outcome_of
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.residents import Residents
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.session import Session
from optigpu.documents.events import Estimated, VariantFinished
from optigpu.documents.result import Outcome, Samples, VerdictWarning
from optigpu.job.estimate import spoken
from optigpu.job.spec import JobSpec, Variant
from optigpu.vocabulary import HostMemoryError, OverdueError, StoppedError, UnsupportedError, VariantStatus


class Group:
    """Variants that are measured side by side. The first replicate finds out how many of them fit into memory. After
    `measure`, each variant is either in `outcomes`, by its index, or in `waiting`, for the next group. The processes
    of first replicates may be `residents`, which stay until a second replicate begins."""

    def __init__(
        self, session: Session, variants: Sequence[Variant], residents: Residents | None = None
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.waiting: tuple[Variant, ...] = ()
        # Whether all of the group were resident at once in every replicate.
        self.fit_together = True
        self._session, self._residents = session, residents
        self._members = tuple(variants)
        self._variants = {variant.index: variant for variant in variants}
        self._replicates: dict[int, list[Replicate]] = {variant.index: [] for variant in variants}
        # For each variant, those that were resident together with it in every replicate so far.
        self._together = {variant.index: set(self._variants) for variant in variants}
        # Why variants have fewer replicates than were asked for.
        self._shortened: dict[int, str] = {}

    def measure(self, preparation: Preparation) -> None:
        """Fewer replicates than were asked for are measured where time is short. Raises what the listener raises, and
        StoppedError when the job must stop: variants with a whole replicate have their outcome by then."""
        try:
            self._measure_replicates(preparation.complete)
        except StoppedError as stop:
            self._end_members(preparation, str(stop))
            raise
        self._end_members(preparation)

    def _measure_replicates(self, prepare: Callable[[], None]) -> None:
        for number in range(self._session.replicates):
            if number == 0:
                self.waiting = self._take_turn(self._members, number, prepare)
            elif self._session.progress.has_time_for(
                # Together with one of each variant that waits.
                [(each.index, number) for each in self._members] + [(each.index, 0) for each in self.waiting]
            ):
                waiting = self._take_turn(self._members, number)
                while waiting:  # memory has become short: each of several turns measures at least one
                    self.fit_together = False
                    waiting = self._take_turn(waiting, number)
            else:
                self._leave_out(number)
                break
            self._members = tuple(v for v in self._members if len(self._replicates[v.index]) > number)

    def _leave_out(self, first: int) -> None:
        session, numbers = self._session, range(first, self._session.replicates)
        session.progress.leave_out([(each.index, number) for each in self._members for number in numbers])
        session.on_event(
            Estimated(
                seconds=session.progress.expected_s,
                limit_s=session.spec.limits.timeout_s,
                replicates=first,
                sentence=f"{_why_short(session.spec)} {first} of {session.spec.measure.replicates} replicates of "
                f"{', '.join(each.label for each in self._members)} are measured.",
            )
        )

    def _take_turn(
        self, variants: Sequence[Variant], number: int, prepare: Callable[[], None] = lambda: None
    ) -> tuple[Variant, ...]:
        if self._residents is not None and number > 0:
            self._residents.keep(())  # those of the first replicate end before others start
        turn = (self._residents if number == 0 else None) or Residents(self._session, number, prepare)
        try:
            turn.measure(variants, stay=turn is self._residents)
        except StoppedError:
            self._keep(turn, variants)
            raise
        self._keep(turn, variants)
        return turn.waiting

    def _keep(self, turn: Residents, variants: Sequence[Variant]) -> None:
        """Keeps a turn's whole replicates; ends the variants that failed, unless time alone was short."""
        for index, error in turn.errors.items():
            self._session.progress.give_up(index)
            if isinstance(error, OverdueError) and self._replicates[index]:
                self._shortened[index] = str(error)
            else:
                unsupported = isinstance(error, UnsupportedError)
                status = VariantStatus.UNSUPPORTED if unsupported else VariantStatus.FAILED
                memory = isinstance(error, HostMemoryError)
                self._end(Outcome(index=index, status=status, reason=str(error), host_memory=memory))
        apart = {*turn.errors, *(variant.index for variant in turn.waiting)}
        for index, replicate in turn.replicates.items():
            self._replicates[index].append(replicate)
            self._together[index] &= {variant.index for variant in variants} - apart

    def _end_members(self, preparation: Preparation, why_stopped: str = "") -> None:
        """The outcomes of the variants that have whole replicates. With fewer than were asked for, they say why."""
        asked = self._session.spec.measure.replicates
        evidence = {index: evidence_of(self._session, found) for index, found in self._replicates.items()}
        for index, found in evidence.items():
            if not found or index in self.outcomes:
                continue
            together = {other: evidence[other] for other in sorted(self._together[index])}
            outcome = outcome_of(self._session, self._variants[index], found, together, preparation)
            if len(found) < asked:
                why = self._shortened.get(index) or why_stopped or _why_short(self._session.spec)
                outcome = _incomplete(outcome, len(found), asked, why)
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.index] = outcome
        self._session.on_event(VariantFinished(outcome=outcome))


def measure_again(session: Session, baseline: Variant) -> Samples:
    """The baseline's primary samples, from one more process at the end; empty if that fails or time is short."""
    number = session.spec.measure.replicates
    if not session.progress.has_time_for([(baseline.index, number)]):
        return ()
    turn = Residents(session, number).measure([baseline])
    again = evidence_of(session, list(turn.replicates.values()))
    return tuple(each.selection.of(each.replicate.samples[baseline.workload.primary]) for each in again)


def _why_short(spec: JobSpec) -> str:
    limit = spoken(spec.limits.timeout_s)
    return f"The time limit of {limit} leaves no time for more; raise limits.timeout_s or measure less."


def _incomplete(outcome: Outcome, count: int, asked: int, why: str) -> Outcome:
    """The outcome with the warning that its result has only `count` of the replicates that were asked for."""
    assert outcome.result is not None
    verdict = outcome.result.verdict
    was = "was" if count == 1 else "were"
    marked = verdict.model_copy(
        update={
            "warnings": (*verdict.warnings, VerdictWarning.INCOMPLETE),
            "notes": (*verdict.notes, f"Only {count} of {asked} replicates {was} measured. {why}"),
        }
    )
    result = outcome.result.model_copy(update={"verdict": marked})
    return outcome.model_copy(update={"result": result})
