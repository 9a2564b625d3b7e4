"""spec -> variants: single, ladder, memory-ladder, ablation, grid, and what is measured beside them.

A ladder whose stack nobody named is cut to about two minutes by the estimate of its time. What a job asks for of the
worker that takes it stands here as well.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product
from typing import Any

from optigpu.documents.endpoints import engine_name
from optigpu.documents.result import Environment
from optigpu.documents.views import Want
from optigpu.job.estimate import FirstGuess, Plan
from optigpu.job.search import stacks_of
from optigpu.job.spec import Beside, JobSpec, PlanName, Variant, expand_workload, resolve
from optigpu.models.described import facts_of
from optigpu.models.held import FILES
from optigpu.models.reference import parse_reference, preset_of
from optigpu.surgery.extras import install_command
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, Frozen, Role, SpecError
from optigpu.workloads.base import Workload

BASELINE = "baseline"


@dataclass(frozen=True)
class Draft:
    """A variant before it is numbered: why it is there, its resolved stack, a label that was given. `rung` is the
    technique that it adds or leaves out. `backend` is None for the job's own."""

    role: Role
    stack: tuple[Technique, ...] = ()
    rung: str | None = None
    backend: str | None = None
    label: str | None = None
    endpoint: str | None = None

    def engine(self, spec: JobSpec) -> str:
        return spec.engine if self.backend is None else engine_name(self.backend, self.endpoint)


def variants_of(spec: JobSpec) -> tuple[Variant, ...]:
    """The variants of a job in the order in which they are measured: model by model. A variant that stands for two
    things (a ladder's first prefix is its first technique alone) is measured once. No two have the same label. Raises
    SpecError when there are more than the job allows, and for a label that was given to two or is another variant's."""
    workloads = expand_workload(spec.workload)
    most = spec.limits.max_variants // (len(workloads) * len(spec.asked_models))
    drafts = _distinct(spec, most)
    labels = _labels(drafts, spec)
    named = [(workload, workload.label if len(workloads) > 1 else "") for workload in workloads]
    every = product(_named_models(spec), named, zip(drafts, labels, strict=True))
    return tuple(
        _variant(index, spec, model, workload, draft, f"{model_name} {shape}".strip(), label)
        for index, ((model, model_name), (workload, shape), (draft, label)) in enumerate(every)
    )


def _named_models(spec: JobSpec) -> list[tuple[str | None, str]]:
    """Each model, and what labels call it: nothing for the only one, its bare name where that tells them apart."""
    if len(spec.models) < 2:
        return [(model, "") for model in spec.asked_models]
    bare = [parse_reference(model).name for model in spec.models]
    names = bare if len(set(bare)) == len(bare) else spec.models
    return list(zip(spec.models, names, strict=True))


def default_stack(
    environment: Environment, device: DeviceKind, workload: Workload, backend: str
) -> tuple[Technique, ...]:
    """The techniques of a backend that suit a device, for a ladder whose stack was not named."""
    return resolve(
        (each for each in _applicable(device, workload, backend) if each.suits(environment, device)),
        workload.kind,
    )


def default_beside(
    environment: Environment, device: DeviceKind, workload: Workload, backend: str, model: str | None
) -> tuple[Beside, ...]:
    """What is measured beside such a ladder: techniques of that backend that no stack with others can hold."""
    reference = parse_reference(model) if model else None
    facts = facts_of(reference) if reference else None
    is_trained = reference is not None and preset_of(reference) is None
    found = (
        each.as_alternative(environment, device, facts, is_trained)
        for each in _applicable(device, workload, backend)
    )
    return tuple(
        Beside(backend=backend, stack=(each,)) for each in found if each and each.fits(workload) is None
    )


def with_default_stack(spec: JobSpec, environment: Environment) -> JobSpec:
    """The job with the techniques that suit its device on that machine, those that exclude the others beside them. Of
    several models, those that are beside each of them."""
    about = (environment, spec.device, spec.workload, spec.backend)
    first, *others = (default_beside(*about, model) for model in spec.asked_models)
    beside = spec.beside or tuple(each for each in first if all(each in other for other in others))
    return spec.model_copy(update={"stack": default_stack(*about), "beside": beside})


def _applicable(device: DeviceKind, workload: Workload, backend: str) -> Iterator[Technique]:
    """Each technique of a backend that runs on the device and has an effect on the workload, with usual parameters."""
    for name, kind in TECHNIQUES.items():
        if device in kind.devices and workload.task in kind.tasks and backend in kind.backends:
            yield kind(name=name)


def _drafts(spec: JobSpec) -> Iterator[Draft]:
    """Those of the job's plan, then what is measured beside them."""
    kind = spec.workload.kind
    if spec.plan in (PlanName.GRID, PlanName.MEMORY_LADDER, PlanName.BATCH_SCALING):
        yield Draft(Role.BASELINE)
    match spec.plan:
        case PlanName.SINGLE:
            yield Draft(Role.SINGLE, resolve(spec.stack, kind))
        case PlanName.LADDER:
            yield from _ladder(spec)
        case PlanName.ABLATION:  # what the stack loses without a technique depends on no order
            yield from _ladder(spec)
            for technique in spec.stack:
                left, stack = without(spec, technique)
                label = f"without {', '.join(each.name for each in left)}"
                yield Draft(Role.LEFT_OUT, stack, technique.name, label=label)
        case PlanName.GRID:
            for size in range(1, len(spec.stack) + 1):
                for chosen in combinations(spec.stack, size):
                    yield Draft(Role.SINGLE, resolve(chosen, kind))
        case PlanName.MEMORY_LADDER:  # a rung that this machine or this model cannot run ends with the reason
            for rung in MEMORY_LADDER:
                yield Draft(Role.SINGLE, rung.stack(kind), backend=rung.backend, label=rung.label)
        case PlanName.SEARCH:  # as many stacks of the menu as the limit allows
            most = spec.limits.max_variants - len(spec.beside)
            for stack in islice(stacks_of(spec.stack, kind), max(most, 1)):
                yield Draft(Role.SINGLE if stack else Role.BASELINE, stack)
        case PlanName.BATCH_SCALING if spec.stack:
            yield Draft(Role.SINGLE, resolve(spec.stack, kind))
    for each in spec.beside:
        stack = resolve(each.stack, kind)
        yield Draft(Role.SINGLE, stack, backend=each.backend, label=each.label, endpoint=each.endpoint)


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


def without(spec: JobSpec, technique: Technique) -> tuple[tuple[Technique, ...], tuple[Technique, ...]]:
    """The techniques that are left out with this one, itself the first, and the whole stack without them. What requires
    it would bring it back, so that it is left out as well."""
    kind = spec.workload.kind
    left = [
        each for each in spec.stack if technique.name in (needed.name for needed in resolve((each,), kind))
    ]
    others = (each for each in left if each != technique)
    return (technique, *others), resolve((each for each in spec.stack if each not in left), kind)


def _distinct(spec: JobSpec, most: int) -> list[Draft]:
    """The first draft of each engine and stack. Stops at one too many: a grid doubles with each technique."""
    seen: dict[tuple[str, tuple[Technique, ...]], Draft] = {}
    for draft in _drafts(spec):
        seen.setdefault((draft.engine(spec), draft.stack), draft)
        if len(seen) > most:
            raise SpecError(
                "limits.max_variants: this plan has more variants than the limit allows; shorten the stack, ask for "
                "fewer workloads, or raise the limit."
            )
    return list(seen.values())


def _variant(
    index: int, spec: JobSpec, model: str | None, workload: Workload, draft: Draft, about: str, label: str
) -> Variant:
    """`about` tells it from those of other models and workloads, where there are some."""
    limit = None
    if spec.plan is PlanName.BATCH_SCALING and spec.limits.max_bytes:
        # one digest, whatever a workload's usual batch is
        workload, limit = workload.model_copy(update={"batch_size": 1}), int(spec.limits.max_bytes)
    return Variant(
        index=index,
        role=draft.role,
        label=about if about and label == BASELINE else ": ".join(filter(None, (about, label))),
        rung=draft.rung,
        workload=workload,
        model=model,
        backend=draft.backend or spec.backend,
        endpoint=draft.endpoint if draft.backend else spec.endpoint,
        device=spec.device,
        stack=draft.stack,
        memory_limit_bytes=limit,
    )


def _labels(drafts: Sequence[Draft], spec: JobSpec) -> list[str]:
    plain = [_names(draft.engine(spec), [technique.label for technique in draft.stack]) for draft in drafts]
    alike: dict[str, list[tuple[Technique, ...]]] = {}
    for draft, names in zip(drafts, plain, strict=True):
        if not draft.label:
            alike.setdefault(names, []).append(draft.stack)
    labels = []
    for draft, names in zip(drafts, plain, strict=True):
        label = draft.label
        if not label:
            siblings = zip(*alike[names], strict=True)
            told_apart = map(_with_differences, draft.stack, siblings)
            label = _names(draft.engine(spec), list(told_apart))
        labels.append(label)
    for draft, label in zip(drafts, labels, strict=True):
        if draft.label and labels.count(label) > 1:
            raise SpecError(f"beside: the label {label!r} is another variant's as well; choose another.")
    return labels


def _names(engine: str, techniques: Sequence[str]) -> str:
    """A leaderboard has rows of several engines, so all but the usual one are named."""
    names = " + ".join(techniques) or BASELINE
    return names if engine == JobSpec.model_fields["backend"].default else f"{engine}: {names}"


def _with_differences(technique: Technique, siblings: Sequence[Technique]) -> str:
    """Its label and the parameters in which its siblings, itself among them, differ: "native_decode(weights=w8)"."""
    others = [sibling.model_dump(mode="json") for sibling in siblings]
    differing = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in technique.model_dump(mode="json").items()
        if any(other[name] != value for other in others)
    ]
    return f"{technique.label}({', '.join(differing)})" if differing else technique.label


@dataclass(frozen=True)
class Rung:
    """A row of the ladder: its label, and the techniques' names with their parameters."""

    label: str
    techniques: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    backend: str = "torch"

    def stack(self, workload: str) -> tuple[Technique, ...]:
        named = (TECHNIQUES[name](name=name, **parameters) for name, parameters in self.techniques.items())
        return resolve(named, workload)


_PLAIN: Mapping[str, Any] = {}

MEMORY_LADDER: tuple[Rung, ...] = (
    Rung("BF16", {"bf16": _PLAIN, "eager_attention": _PLAIN}),
    Rung("+ fused attention", {"bf16": _PLAIN, "fused_attention": _PLAIN}),
    Rung("+ torch.compile", {"bf16": _PLAIN, "fused_attention": _PLAIN, "torch_compile": _PLAIN}),
    Rung("INT8", {"bf16": _PLAIN, "llm_int8": _PLAIN}),
    Rung("NF4", {"bf16": _PLAIN, "nf4": _PLAIN}),
    Rung("GPTQ INT4", {"bf16": _PLAIN, "gptq": _PLAIN}),
    Rung("AWQ INT4", {"bf16": _PLAIN, "awq": _PLAIN}),
    Rung("GGUF Q4_K_M", {"gguf": {"type": "Q4_K_M"}}, backend="llama_cpp"),
)


SHORT_S = 120.0
MOST_SECONDS = 10.0
"""How long a process of a shortened ladder is measured at most."""
FEW_NEW_TOKENS = 32
"""Of its requests: steps are as long as in a longer one, and warm-up, audit and meters take whole requests."""


def shortened(spec: JobSpec, plan_of: Callable[[JobSpec], Plan], *, may_shorten: bool = True) -> JobSpec:
    """The job with one process for each variant and less time for it, then with short requests if `may_shorten` them,
    then without the techniques that are expected to gain the least, as far as it takes to fit into SHORT_S. One of them
    stays."""
    if plan_of(spec).seconds <= SHORT_S:
        return spec
    measure = {"replicates": 1, "max_seconds": max(spec.measure.min_seconds, MOST_SECONDS)}
    spec = spec.model_copy(update={"measure": spec.measure.model_copy(update=measure)})
    is_long = not spec.workload.is_served and _new_tokens(spec) > FEW_NEW_TOKENS
    if may_shorten and is_long and plan_of(spec).seconds > SHORT_S:
        few = {"new_tokens": FEW_NEW_TOKENS}
        spec = spec.model_copy(update={"workload": spec.workload.model_copy(update=few)})
    while plan_of(spec).seconds > SHORT_S and len(spec.stack) + len(spec.beside) > 1:
        spec = min(_without_one(spec), key=lambda fewer: (fewer.gain, plan_of(fewer.spec).seconds)).spec
    return spec


@dataclass(frozen=True)
class _Fewer:
    """A job with a technique less. `gain` is the predicted speed of what it lacks, relative to the baseline's."""

    spec: JobSpec
    gain: float


def _new_tokens(spec: JobSpec) -> int:
    """Of a request; 0 where it generates none."""
    return int(getattr(spec.workload, "new_tokens", 0))


def left_out_of_ladder(whole: JobSpec, spec: JobSpec) -> str:
    """What a shortened ladder leaves out, in one sentence with the flag for it; empty for nothing."""
    if spec == whole:
        return ""
    gone: list[str] = [each.name for each in whole.stack if each not in spec.stack]
    gone += [
        " + ".join(technique.name for technique in each.stack)
        for each in whole.beside
        if each not in spec.beside
    ]
    without = f"leaves out {', '.join(gone)} and " if gone else ""
    measure = spec.measure
    requests = f", by requests of {_new_tokens(spec)} new tokens" if spec.workload != whole.workload else ""
    return (
        f"To end in about two minutes, this ladder {without}measures {measure.replicates} process of each variant "
        f"instead of {whole.measure.replicates}, for {measure.max_seconds:g} s at most{requests}; --stack all measures "
        "all."
    )


def _without_one(spec: JobSpec) -> Iterator[_Fewer]:
    """Without each technique and what requires it, and without each stack that is beside."""
    plain_s = _request_s(spec, ())
    for each in spec.stack:
        gone = [each, *(other for other in spec.stack if each.name in other.requires)]
        kept = tuple(other for other in spec.stack if other not in gone)
        if not (kept or spec.beside):
            continue
        fastest_s = min(_request_s(spec, _with_required(other, spec.stack)) for other in gone)
        yield _Fewer(spec.model_copy(update={"stack": kept}), plain_s / fastest_s)
    for beside in spec.beside:
        others = tuple(other for other in spec.beside if other != beside)
        yield _Fewer(spec.model_copy(update={"beside": others}), plain_s / _request_s(spec, beside.stack))


def _with_required(technique: Technique, stack: Sequence[Technique]) -> tuple[Technique, ...]:
    return tuple(each for each in stack if each == technique or each.name in technique.requires)


def _request_s(spec: JobSpec, stack: Sequence[Technique]) -> float:
    """Of a request with that stack alone, by a first guess."""
    alone = {"stack": tuple(stack), "beside": (), "plan": PlanName.SINGLE}
    return FirstGuess(variants_of(spec.model_copy(update=alone))[0]).request_s


HUB, FOLDER = "hub:", "path:"
"""How references begin that not every worker can load."""


class Need(Frozen):
    """One thing that a worker must have. `name` is as in `optigpu.documents.views.Unserved`."""

    kind: Want
    name: str

    @property
    def next_step(self) -> str:
        match self.kind:
            case Want.DEVICE:
                return f"Start one with `python -m worker --device {self.name}` on a machine that has it."
            case Want.GPU:
                return "Name one of them in target.gpu, or start a worker that has it."
            case Want.MEMORY:
                return "Ask for less in target.min_vram_bytes, or start a worker that has it."
            case Want.PACKAGE:
                how = install_command(self.name)
                return f"Install it where a worker runs, with: {how}; then start that worker again."
            case Want.MODEL if self.name.startswith(FOLDER):
                what = "file" if self.name.endswith(tuple(FILES)) else "folder"
                return f"Put the {what} there; a worker without a job finds it within seconds."
            case Want.MODEL:
                return "Put it into a worker's cache, or start a worker without HF_HUB_OFFLINE."
            case _:
                return "Install what it needs where a worker runs, then start that worker again."


def needs_of(spec: JobSpec) -> tuple[Need, ...]:
    """Each thing once without which the job's own stack cannot be measured. A worker need not have what only a stack
    `beside` it asks for: without it that variant alone ends `unsupported`."""
    # A search goes on without the stacks that a worker cannot run.
    stack = () if spec.plan is PlanName.SEARCH else resolve(spec.stack, spec.workload.kind)
    facts = [facts_of(parse_reference(model)) if model else None for model in spec.asked_models]
    packages = (package for known in facts for technique in stack for package in technique.packages(known))
    # the models and those that techniques name, such as a draft, without those that are everywhere
    values = (value for technique in stack for value in technique.model_dump().values())
    names = (name for name in (*spec.asked_models, *values) if isinstance(name, str))
    asked: dict[Want, Iterable[str]] = {
        Want.BACKEND: (spec.backend,),
        Want.PACKAGE: packages,
        Want.MODEL: (name for name in names if name.startswith((HUB, FOLDER))),
    }
    return tuple(Need(kind=kind, name=name) for kind, each in asked.items() for name in dict.fromkeys(each))
