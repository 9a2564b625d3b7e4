"""Measures a group of variants that fit into memory together, from the first replicate to their outcomes."""

from collections.abc import Sequence

from optigpu.conductor.outcome import outcome_of
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.residents import Residents
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.session import Session
from optigpu.documents.events import VariantFinished
from optigpu.documents.result import Outcome, Samples
from optigpu.job.spec import Variant
from optigpu.vocabulary import UnsupportedError, VariantStatus


class Group:
    """Variants that are measured side by side. The first replicate finds out how many of them fit into memory.

    After `measure`, each variant is either in `outcomes`, by its index, or in `waiting`, for the next group.
    """

    def __init__(self, session: Session, variants: Sequence[Variant]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.waiting: tuple[Variant, ...] = ()
        # Whether all of the group were resident at once in every replicate.
        self.fit_together = True
        self._session = session
        self._members = tuple(variants)
        self._replicates: dict[int, list[Replicate]] = {variant.index: [] for variant in variants}
        # For each variant, those that were resident together with it in every replicate so far.
        self._together = {variant.index: {each.index for each in variants} for variant in variants}

    def measure(self, preparation: Preparation) -> None:
        """Raises CancelledError, and what the session's listener raises."""
        for number in range(self._session.spec.measure.replicates):
            if number == 0:
                self.waiting = self._take_turn(self._members, number)
            else:
                self._measure_all(number)
            self._members = tuple(v for v in self._members if len(self._replicates[v.index]) > number)
        for variant in self._members:
            replicates, together = self._replicates[variant.index], sorted(self._together[variant.index])
            self._end(outcome_of(self._session, variant, replicates, together, preparation))

    def _measure_all(self, number: int) -> None:
        """One replicate of every member. If memory has become short, in several turns: each measures at least one."""
        waiting = self._take_turn(self._members, number)
        while waiting:
            self.fit_together = False
            waiting = self._take_turn(waiting, number)

    def _take_turn(self, variants: Sequence[Variant], number: int) -> tuple[Variant, ...]:
        """Measures those of the variants that fit into memory and returns the others."""
        turn = Residents(self._session, number).measure(variants)
        for index, error in turn.errors.items():
            self._session.progress.give_up(index)
            self._end(_without_result(index, error))
        for index, replicate in turn.replicates.items():
            self._replicates[index].append(replicate)
            self._together[index] &= set(turn.replicates)
        return turn.waiting

    def _end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.index] = outcome
        self._session.on_event(VariantFinished(outcome=outcome))


def measure_again(session: Session, baseline: Variant) -> Samples:
    """The baseline's primary samples, from one more process at the end; empty if that fails."""
    turn = Residents(session, session.spec.measure.replicates).measure([baseline])
    return tuple(each.samples[baseline.workload.primary] for each in turn.replicates.values())


def _without_result(index: int, error: Exception) -> Outcome:
    """A variant with a replicate missing has no result."""
    unsupported = isinstance(error, UnsupportedError)
    status = VariantStatus.UNSUPPORTED if unsupported else VariantStatus.FAILED
    return Outcome(index=index, status=status, reason=str(error))
