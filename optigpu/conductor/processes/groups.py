"""A group of variants that fit into memory together, through all their replicates, to their outcomes."""

from collections.abc import Sequence

from optigpu.conductor.outcome import outcome_of
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.residents import Bench, take_turns
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts.host_monitor import Witness
from optigpu.documents.events import VariantFinished
from optigpu.documents.result import Outcome, Samples
from optigpu.job.spec import Variant
from optigpu.vocabulary import UnsupportedError, VariantStatus


def measure_group(
    bench: Bench, variants: Sequence[Variant], witness: Witness, preparation: Preparation
) -> tuple[dict[int, Outcome], tuple[Variant, ...]]:
    """Measures as many of the variants as can be resident at once; the others are given back.

    How many can is found out with the first replicate, and stays for the others.
    """
    outcomes: dict[int, Outcome] = {}
    replicates: dict[int, list[Replicate]] = {variant.index: [] for variant in variants}
    members, waiting = tuple(variants), ()  # type: tuple[Variant, ...], tuple[Variant, ...]
    for number in range(bench.spec.measure.replicates):
        turn = take_turns(bench, members, number, witness)
        if number == 0:
            waiting = turn.waiting
        for index, error in turn.errors.items():
            bench.watch.give_up(index)
            _end(bench, outcomes, _without_result(index, error))
        for index, replicate in turn.replicates.items():
            replicates[index].append(replicate)
        members = tuple(variant for variant in members if variant.index in turn.replicates)
    together = tuple(variant.index for variant in members)
    for variant in members:
        outcome = outcome_of(bench, variant, replicates[variant.index], together, preparation)
        _end(bench, outcomes, outcome)
    return outcomes, waiting


def measure_again(bench: Bench, baseline: Variant, witness: Witness) -> Samples:
    """The baseline's primary samples, from one more process at the end; empty where that fails."""
    turn = take_turns(bench, [baseline], bench.spec.measure.replicates, witness)
    return tuple(each.samples[baseline.workload.primary] for each in turn.replicates.values())


def _end(bench: Bench, outcomes: dict[int, Outcome], outcome: Outcome) -> None:
    outcomes[outcome.index] = outcome
    bench.on_event(VariantFinished(outcome=outcome))


def _without_result(index: int, error: Exception) -> Outcome:
    """With one of its replicates missing a variant has no result."""
    unsupported = isinstance(error, UnsupportedError)
    status = VariantStatus.UNSUPPORTED if unsupported else VariantStatus.FAILED
    return Outcome(index=index, status=status, reason=str(error))
