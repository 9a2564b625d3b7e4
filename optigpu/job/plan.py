"""spec -> variants: single, ladder, grid, and what is measured beside them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations

from optigpu.documents.result import Environment
from optigpu.job.spec import JobSpec, PlanName, Variant, expand_workload, resolve
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, Role, SpecError
from optigpu.workloads.base import Workload

BASELINE = "baseline"


@dataclass(frozen=True)
class Draft:
    """A variant before it is numbered: why it is there, its resolved stack, the rung it adds, a label that was given.

    `backend` is None for the job's own.
    """

    role: Role
    stack: tuple[Technique, ...] = ()
    rung: str | None = None
    backend: str | None = None
    label: str | None = None


def variants_of(spec: JobSpec) -> tuple[Variant, ...]:
    """The variants of a job in the order in which they are measured.

    A variant that stands for two things (a ladder's first prefix is its first technique alone) is measured once.
    Raises SpecError when there are more than the job allows.
    """
    workloads = expand_workload(spec.workload)
    most = spec.limits.max_variants // len(workloads)
    planned = {PlanName.SINGLE: _single, PlanName.LADDER: _ladder, PlanName.GRID: _grid}[spec.plan]
    drafts = _distinct(chain(planned(spec), _beside(spec)), spec.backend, most)
    return tuple(
        _variant(index, spec, workload, draft, several=len(workloads) > 1)
        for index, (workload, draft) in enumerate((w, d) for w in workloads for d in drafts)
    )


def default_stack(
    environment: Environment, device: DeviceKind, workload: Workload, backend: str
) -> tuple[Technique, ...]:
    """The techniques of a backend that suit a device, for a ladder whose stack was not named."""
    every = (
        kind(name=name)
        for name, kind in TECHNIQUES.items()
        if workload.task in kind.tasks and backend in kind.backends
    )
    return resolve((technique for technique in every if technique.suits(environment, device)), workload.kind)


def _single(spec: JobSpec) -> Iterator[Draft]:
    yield Draft(Role.SINGLE, resolve(spec.stack, spec.workload.kind))


def _ladder(spec: JobSpec) -> Iterator[Draft]:
    """Baseline, references, each technique alone (with what it requires), then each prefix of the stack."""
    yield Draft(Role.BASELINE)
    named, kind = list(spec.stack), spec.workload.kind
    for technique in named:
        if technique.compared_with:
            reference = (TECHNIQUES[name](name=name) for name in technique.compared_with)
            yield Draft(Role.REFERENCE, resolve(reference, kind))
    for technique in named:
        yield Draft(Role.ALONE, resolve((technique,), kind), technique.name)
    for length in range(2, len(named) + 1):
        yield Draft(Role.CUMULATIVE, resolve(named[:length], kind), named[length - 1].name)


def _grid(spec: JobSpec) -> Iterator[Draft]:
    """Every combination of the stack's techniques, the empty one first as the baseline."""
    yield Draft(Role.BASELINE)
    for size in range(1, len(spec.stack) + 1):
        for chosen in combinations(spec.stack, size):
            yield Draft(Role.SINGLE, resolve(chosen, spec.workload.kind))


def _beside(spec: JobSpec) -> Iterator[Draft]:
    for each in spec.beside:
        stack = resolve(each.stack, spec.workload.kind)
        yield Draft(Role.SINGLE, stack, backend=each.backend, label=each.label)


def _distinct(drafts: Iterable[Draft], own: str, most: int) -> list[Draft]:
    """The first draft of each backend and stack; `own` is the job's backend.

    Stops at one too many: a grid doubles with each technique.
    """
    seen: dict[tuple[str, tuple[Technique, ...]], Draft] = {}
    for draft in drafts:
        seen.setdefault((draft.backend or own, draft.stack), draft)
        if len(seen) > most:
            raise SpecError(
                "limits.max_variants: this plan has more variants than the limit allows; shorten the stack, ask for "
                "fewer workloads, or raise the limit."
            )
    return list(seen.values())


def _variant(index: int, spec: JobSpec, workload: Workload, draft: Draft, *, several: bool) -> Variant:
    backend = draft.backend or spec.backend
    names = draft.label or _names(backend, draft.stack)
    says_what = names != BASELINE
    return Variant(
        index=index,
        role=draft.role,
        label=f"{workload.label}: {names}" if several and says_what else workload.label if several else names,
        rung=draft.rung,
        workload=workload,
        model=spec.model,
        backend=backend,
        device=spec.device,
        stack=draft.stack,
    )


def _names(backend: str, stack: tuple[Technique, ...]) -> str:
    """A leaderboard has rows of several backends, so all but the usual one are named."""
    names = " + ".join(technique.name for technique in stack) or BASELINE
    return names if backend == JobSpec.model_fields["backend"].default else f"{backend}: {names}"
