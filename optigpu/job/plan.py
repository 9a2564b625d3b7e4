"""spec -> variants: single, ladder, grid."""

from collections.abc import Iterable, Iterator
from itertools import combinations

from optigpu.documents.result import Environment
from optigpu.job.spec import JobSpec, PlanName, Variant, expand_workload, resolve
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, Role, SpecError
from optigpu.workloads.base import Workload

Draft = tuple[Role, str | None, tuple[Technique, ...]]
"""A variant before it is numbered: why it is there, the rung it adds, its resolved stack."""


def variants_of(spec: JobSpec) -> tuple[Variant, ...]:
    """The variants of a job in the order in which they are measured.

    A variant that stands for two things (a ladder's first prefix is its first technique alone) is measured once.
    Raises SpecError when there are more than the job allows.
    """
    workloads = expand_workload(spec.workload)
    most = spec.limits.max_variants // len(workloads)
    drafts = _distinct(
        {PlanName.SINGLE: _single, PlanName.LADDER: _ladder, PlanName.GRID: _grid}[spec.plan](spec), most
    )
    return tuple(
        _variant(index, spec, workload, draft, several=len(workloads) > 1)
        for index, (workload, draft) in enumerate((w, d) for w in workloads for d in drafts)
    )


def default_stack(environment: Environment, device: DeviceKind, workload: Workload) -> tuple[Technique, ...]:
    """The techniques that suit a device, for a ladder whose stack was not named."""
    every = (kind(name=name) for name, kind in TECHNIQUES.items() if workload.task in kind.tasks)
    return resolve((technique for technique in every if technique.suits(environment, device)), workload.kind)


def _single(spec: JobSpec) -> Iterator[Draft]:
    yield Role.SINGLE, None, resolve(spec.stack, spec.workload.kind)


def _ladder(spec: JobSpec) -> Iterator[Draft]:
    """Baseline, references, each technique alone (with what it requires), then each prefix of the stack."""
    yield Role.BASELINE, None, ()
    named, kind = list(spec.stack), spec.workload.kind
    for technique in named:
        if technique.compared_with:
            yield (
                Role.REFERENCE,
                None,
                resolve((TECHNIQUES[name](name=name) for name in technique.compared_with), kind),
            )
    for technique in named:
        yield Role.ALONE, technique.name, resolve((technique,), kind)
    for length in range(2, len(named) + 1):
        yield Role.CUMULATIVE, named[length - 1].name, resolve(named[:length], kind)


def _grid(spec: JobSpec) -> Iterator[Draft]:
    """Every combination of the stack's techniques, the empty one first as the baseline."""
    yield Role.BASELINE, None, ()
    for size in range(1, len(spec.stack) + 1):
        for chosen in combinations(spec.stack, size):
            yield Role.SINGLE, None, resolve(chosen, spec.workload.kind)


def _distinct(drafts: Iterable[Draft], most: int) -> list[Draft]:
    """The first draft of each stack. Stops at one too many: a grid doubles with each technique."""
    seen: dict[tuple[Technique, ...], Draft] = {}
    for draft in drafts:
        seen.setdefault(draft[2], draft)
        if len(seen) > most:
            raise SpecError(
                "limits.max_variants: this plan has more variants than the limit allows; shorten the stack, ask for "
                "fewer workloads, or raise the limit."
            )
    return list(seen.values())


def _variant(index: int, spec: JobSpec, workload: Workload, draft: Draft, *, several: bool) -> Variant:
    role, rung, stack = draft
    names = " + ".join(technique.name for technique in stack) or "baseline"
    return Variant(
        index=index,
        role=role,
        label=f"{workload.label}: {names}" if several and stack else workload.label if several else names,
        rung=rung,
        workload=workload,
        model=spec.model,
        backend=spec.backend,
        device=spec.device,
        stack=stack,
    )
