"""A group of variants that fit into memory together, through all their replicates, to their outcomes."""

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
        self._session = session
        self._members = tuple(variants)
        self._replicates: dict[int, list[Replicate]] = {variant.index: [] for variant in variants}

    def measure(self, preparation: Preparation) -> None:
        """Raises CancelledError, and what the session's listener raises."""
        for number in range(self._session.spec.measure.replicates):
            self._measure_replicate(number)
        together = tuple(variant.index for variant in self._members)
        for variant in self._members:
            replicates = self._replicates[variant.index]
            self._end(outcome_of(self._session, variant, replicates, together, preparation))

    def _measure_replicate(self, number: int) -> None:
        turn = Residents(self._session, number).measure(self._members)
        if number == 0:
            self.waiting = turn.waiting
        for index, error in turn.errors.items():
            self._session.progress.give_up(index)
            self._end(_without_result(index, error))
        for index, replicate in turn.replicates.items():
            self._replicates[index].append(replicate)
        self._members = tuple(variant for variant in self._members if variant.index in turn.replicates)

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
