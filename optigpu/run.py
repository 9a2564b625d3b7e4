"""run(spec, on_event) -> Report: a job from its request to its results. Loads no torch.

Variants are measured side by side as far as the memory allows; each replicate of a variant is a separate process.
An error ends only its own variant.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optigpu.conductor.preparation import prepare
from optigpu.conductor.processes.groups import Group, measure_again
from optigpu.conductor.processes.memory_budget import MakeMemoryRule, MemoryBudget
from optigpu.conductor.session import Session, open_session
from optigpu.documents.events import Event, Finished, Planned, PlannedVariant
from optigpu.documents.result import Attribution, Outcome, Result, Samples
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.vocabulary import Frozen, Role

REPLICATE = (sys.executable, "-P", "-m", "optigpu.child.replicate")
"""The program that measures. -P keeps files of the working directory from being taken for modules."""

NONE_DONE: Mapping[int, Outcome] = MappingProxyType({})


class Report(Frozen):
    """The results of a run, how each variant ended, and the gain of each technique.

    It covers the whole job, with the outcomes of earlier attempts that were passed to the run.
    """

    spec: JobSpec
    results: tuple[Result, ...]
    outcomes: tuple[Outcome, ...]
    attribution: Attribution

    def document(self) -> dict[str, Any]:
        """The report as plain JSON, without raw samples."""
        return self.model_dump(mode="json", include={"spec", "results", "attribution"})


def never() -> str | None:
    """The default of `cancelled`: no reason to stop."""
    return None


def run(
    spec: JobSpec,
    on_event: Callable[[Event], None],
    *,
    cancelled: Callable[[], str | None] = never,
    done: Mapping[int, Outcome] = NONE_DONE,
    lock_dir: Path | None = None,
    threads: int | None = None,
    program: Sequence[str] = REPLICATE,
    memory_rule: MakeMemoryRule = MemoryBudget,
) -> Report:
    """Measures the variants of a job while no other job is measured on the device.

    `done` are the outcomes of variants, by their index, that an earlier attempt has measured; these are not measured
    again. `on_event` is called with each event as it happens. `cancelled` is asked at least once a second for a reason
    to stop. `threads` is how many the model computes with; None takes every core. `program` is what measures, and
    `memory_rule` decides how many processes of it are resident at once. The job's time limit counts from when it has
    the device.

    Raises SpecError for a plan with too many variants, CancelledError with the reason to stop, OptiGPUError if the
    device cannot be locked, and what `on_event` raises. No process is left behind in any case.
    """
    variants = variants_of(spec)
    on_event(
        Planned(variants=tuple(PlannedVariant(index=v.index, role=v.role, label=v.label) for v in variants))
    )
    todo = [variant for variant in variants if variant.index not in done]
    with open_session(
        spec,
        [variant.index for variant in todo],
        on_event,
        program=program,
        cancelled=cancelled,
        lock_dir=lock_dir,
        threads=threads,
        memory_rule=memory_rule,
    ) as session:
        session.progress.limit(spec.limits.timeout_s)
        measured, again = _measure(session, todo)
    outcomes = {**done, **measured}
    attribution = attribute(spec, variants, outcomes, again)
    on_event(Finished(attribution=attribution))
    ended = tuple(outcomes[index] for index in sorted(outcomes))
    results = tuple(outcome.result for outcome in ended if outcome.result)
    return Report(spec=spec, results=results, outcomes=ended, attribution=attribution)


def _measure(session: Session, todo: Sequence[Variant]) -> tuple[dict[int, Outcome], Samples]:
    """All outcomes, and what the baseline measured again at the end if the variants were not all side by side."""
    preparation = prepare(session, todo)
    outcomes: dict[int, Outcome] = {}
    side_by_side = True
    left = tuple(todo)
    while left:
        group = Group(session, left)
        group.measure(preparation)
        outcomes |= group.outcomes
        left = group.waiting
        side_by_side = side_by_side and group.fit_together and not left
    baseline = next((variant for variant in todo if variant.role is Role.BASELINE), None)
    if side_by_side or baseline is None or outcomes[baseline.index].result is None:
        return outcomes, ()
    return outcomes, measure_again(session, baseline)
