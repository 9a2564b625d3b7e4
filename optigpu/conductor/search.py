"""Measures a search: successive halving, in which the processes of the stacks that go on stay.

Starting a process takes seconds, however briefly it measures. So a stack has one process until the last round, where
those that are missing start. A process that had to make room for others is started again if its stack goes on.
"""

from collections.abc import Sequence

from optigpu.conductor.preparation import Preparation, prepare
from optigpu.conductor.processes.groups import Group
from optigpu.conductor.processes.residents import Residents
from optigpu.conductor.session import Session
from optigpu.documents.events import Event, VariantFinished, VariantStarted
from optigpu.documents.result import Outcome, Samples
from optigpu.fit.memory import predicted_weight_bytes
from optigpu.job.estimate import plan_time
from optigpu.job.search import limited, round_spec, rounds_of, survivors, too_large, with_round
from optigpu.job.spec import Variant
from optigpu.vocabulary import DeadlineError, SpecError, StoppedError, VariantStatus


def search(session: Session, todo: Sequence[Variant], outcomes: dict[int, Outcome]) -> Samples:
    """Adds the outcome of the last round that each variant took part in, and measures no baseline again. That outcome
    alone is an event: a variant whose search goes on has not ended. Raises StoppedError when the job must stop; what a
    stopped round did not measure has the outcome of the round before."""
    # The variants whose predicted weights keep the limit; the others end at once with the reason.
    left = []
    for variant in todo:
        reason = too_large(session.spec, variant, predicted_weight_bytes(variant))
        if reason is None:
            left.append(variant)
            continue
        outcome = Outcome(index=variant.index, status=VariantStatus.UNSUPPORTED, reason=reason)
        outcomes[variant.index] = outcome
        session.on_event(VariantFinished(outcome=outcome))
    found = _Search(session, len(left))
    try:
        found.run(left)
    except StoppedError:
        found.end(outcomes)
        raise
    found.end(outcomes)
    return ()


class _Search:
    """The outcomes of the last round that each variant took part in."""

    def __init__(self, session: Session, candidates: int) -> None:
        self._session, self._count = session, rounds_of(candidates)
        self._held: dict[int, Outcome] = {}

    def run(self, left: Sequence[Variant]) -> None:
        """Measures round by round until one is left, or none is allowed to go on."""
        preparation = prepare(self._session, left)
        with Residents(self._session, 0, preparation.complete) as residents:
            for number in range(self._count):
                chosen = self._measure_round(number, left, residents, preparation)
                left = [variant for index in chosen for variant in left if variant.index == index]
                if not left:
                    break

    def end(self, outcomes: dict[int, Outcome]) -> None:
        for outcome in self._held.values():
            outcomes[outcome.index] = outcome
            self._session.on_event(VariantFinished(outcome=outcome))

    def _measure_round(
        self, number: int, variants: Sequence[Variant], residents: Residents, preparation: Preparation
    ) -> tuple[int, ...]:
        """Measures the variants, as many side by side as fit; returns those that go on, whose processes stay."""
        session = self._round_of(number, variants, residents)
        residents.go_on(session)
        found: dict[int, Outcome] = {}
        chosen: tuple[int, ...] = ()
        waiting = tuple(variants)
        while waiting:
            group = Group(session, waiting, residents)
            try:
                group.measure(preparation)
            finally:
                found |= group.outcomes
                for index, outcome in group.outcomes.items():
                    if index not in self._held or outcome.result is not None:
                        self._held[index] = with_round(outcome, self._session.spec, number, self._count)
            waiting = group.waiting
            chosen = survivors(session.spec, list(found.values()))
            best = [index for index in chosen if index in residents.indexes]
            # Half of the places are for those that wait.
            residents.keep(best[: len(residents.indexes) // 2] if waiting else best)
        return chosen

    def _round_of(self, number: int, variants: Sequence[Variant], residents: Residents) -> Session:
        session = self._session
        shorter = round_spec(session.spec, number, self._count)
        try:
            plan = plan_time(limited(shorter, session.progress.time_left_s), variants)
        except SpecError as error:
            raise DeadlineError(str(error)) from error
        session.progress.begin_round(number, self._count, plan, residents.indexes)

        def tell(event: Event) -> None:
            started_before = isinstance(event, VariantStarted) and number > 0
            if not started_before and not isinstance(event, VariantFinished):
                session.on_event(event)

        return session.in_round(plan, tell)
