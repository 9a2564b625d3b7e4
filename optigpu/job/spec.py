"""A job as it is posted, validated completely before anything is stored or run.

Errors of the request itself are found here; a problem of the machine ends only the variant that it concerns.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from optigpu.backends import BACKENDS
from optigpu.documents.endpoints import ENDPOINT, engine_name, parse_endpoint
from optigpu.documents.fields import refusing
from optigpu.documents.shapes import ImageFacts
from optigpu.meters import METER_NAMES
from optigpu.meters.base import QualityOptions
from optigpu.models.facts import known_facts
from optigpu.models.reference import parse_reference, preset_of
from optigpu.techniques import TECHNIQUES, AnyTechnique
from optigpu.techniques.base import Technique, conflict_between
from optigpu.vocabulary import DeviceKind, Frozen, Role, SpecError, Task, canonical_json
from optigpu.workloads import WORKLOADS, AnyWorkload, kinds_with
from optigpu.workloads.base import Workload


@dataclass(frozen=True)
class OneOf:
    """Validates a string as a Literal of these names would, which a registry knows and a type cannot."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.names))


LARGEST_BATCH = "largest_batch"
"""The metric of the plan batch_scaling."""
LIMITED_BACKEND = "torch"
"""The engine whose memory that plan can limit, and that goes on after it ran out."""
MeterName = Annotated[str, OneOf(METER_NAMES)]
BackendName = Annotated[str, OneOf(tuple(BACKENDS))]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class PlanName(StrEnum):
    """How a job becomes variants."""

    SINGLE = "single"
    LADDER = "ladder"
    ABLATION = "ablation"
    GRID = "grid"
    MEMORY_LADDER = "memory-ladder"
    SEARCH = "search"
    BATCH_SCALING = "batch_scaling"


class Measure(Frozen):
    """How to measure. It is part of no digest: it changes the precision of a figure, not the measured thing.

    `rel_ci` is the width of the median's 95% interval, relative to it, at which sampling may stop.
    """

    replicates: int = Field(3, ge=1, le=50, description="How many processes measure each variant.")
    min_seconds: Seconds = Field(5.0, description="How long a process is measured at least.")
    max_seconds: Seconds = Field(120.0, description="How long a process is measured at most.")
    rel_ci: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Relative width of the median's 95% interval at which sampling may stop.",
    )
    meters: tuple[MeterName, ...] = Field(
        ("latency", "memory", "energy", "quality"), description="What is measured."
    )
    raise_priority: bool = Field(
        True,
        description="Whether measuring processes get the highest priority, where the system allows it.",
    )
    quality: QualityOptions = QualityOptions()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_seconds > self.max_seconds:
            raise ValueError("min_seconds must not exceed max_seconds")
        if "latency" not in self.meters:
            raise ValueError("meters must contain 'latency': the other meters describe what it times")
        return self


class JobTarget(Frozen):
    """Which workers may take a job for CUDA."""

    gpu: str | None = Field(
        None, max_length=100, description="Part of the name of the GPU to measure on; null takes any."
    )
    min_vram_bytes: int = Field(0, ge=0, le=2**50, description="The least memory that the GPU must have.")


class Limits(Frozen):
    """The limits of a job. A variant that loses more quality than they allow is measured and not ranked."""

    timeout_s: Seconds = Field(
        1800.0, description="How long the job may measure; what is finished by then is kept."
    )
    wait_for_quiet_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="How long a job waits at most, before its first process, for other processes to rest.",
    )
    max_variants: int = Field(32, ge=1, le=256, description="How many variants the plan may have.")
    max_kld: float | None = Field(
        None, ge=0, description="The most that a ranked variant may diverge from fp32 (kld_mean), in nats."
    )
    max_bytes: float | None = Field(
        None,
        gt=0,
        description="The most bytes of a stack that a search looks for: of the GPU's peak, on a CPU of the weights. Of "
        "batch_scaling: what weights, states and activations may take, enforced while requests run.",
    )
    max_batch: int = Field(256, ge=1, le=4096, description="The largest batch that batch_scaling tries.")
    min_top1: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The least top-1 agreement of a ranked variant with fp32 (top1_agreement).",
    )


class Variant(Frozen):
    """One measurable thing: a single workload on a model with a resolved stack, backend and device.

    `rung` is the technique that a ladder's variant adds, or that an ablation's leaves out, and None elsewhere.
    `weights` is the hash of the files that the model came from, and `dataset` that of the images that are classified:
    they are known only after they were read, since the files under one name may change. With `memory_limit_bytes` its
    largest batch under that limit is looked for, whatever its workload's batch is, and no speed.
    """

    index: int
    role: Role
    label: str
    rung: str | None = None
    workload: AnyWorkload
    model: str | None
    backend: BackendName = "torch"
    endpoint: str | None = None
    device: DeviceKind
    stack: tuple[AnyTechnique, ...] = ()
    weights: str | None = None
    dataset: str | None = None
    memory_limit_bytes: int | None = None

    @property
    def primary(self) -> str:
        """The metric that it is measured for."""
        return self.workload.primary if self.memory_limit_bytes is None else LARGEST_BATCH

    @property
    def engine(self) -> str:
        """The backend, and for a server what it serves and where."""
        return engine_name(self.backend, self.endpoint)

    @property
    def workload_digest(self) -> str:
        """Equal for results that can be compared; a result's digest includes the weights' hash."""
        more = {
            "weights": self.weights,
            "dataset": self.dataset,
            "memory_limit_bytes": self.memory_limit_bytes,
        }
        known = {name: value for name, value in more.items() if value}
        return digest({"workload": self.workload.identity(), "model": self.model} | known)

    @property
    def digest(self) -> str:
        """Equal for results of the same variant; role and label are not part of it."""
        parts = {
            "workload": self.workload_digest,
            "stack": [technique.identity() for technique in self.stack],
            "backend": self.backend,
            "device": self.device,
        }
        if self.endpoint is not None:
            parts["endpoint"] = self.endpoint
        if self.workload.implementation is not None:
            parts["implementation"] = self.workload.implementation
        return digest(parts)


def _canonical_endpoint(text: str | None) -> str | None:
    return None if text is None else str(_as_value_error(parse_endpoint, text))


EndpointName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=500),
    AfterValidator(_canonical_endpoint),
]


class Beside(Frozen):
    """A stack of any backend that is measured in the same turns as the job's own variants.

    `label` names its variant in tables; None makes one of the backend and the techniques. `endpoint` is the server of
    the backend endpoint.
    """

    backend: BackendName = "torch"
    endpoint: EndpointName | None = None
    stack: tuple[AnyTechnique, ...] = Field((), max_length=16)
    label: str | None = Field(None, min_length=1, max_length=100)


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Tag = Annotated[str, StringConstraints(pattern=r"^[\w.:/-]{1,50}$")]


class JobSpec(Frozen):
    """One request to measure. A job for `device` "cuda" waits for a worker that has one.

    `beside` names other stacks, of this backend or others, that run the same workload on the same model and device: the
    processes of all variants take turns, so that their ratios hold on a machine whose speed drifts. With `models` in
    the place of `model` the plan is measured for each of them, with a baseline and gains of its own. `name`, `tags` and
    `note` are for people: they change nothing of what is measured, and are in no digest.
    """

    workload: AnyWorkload
    model: str | None = Field(
        None,
        max_length=200,
        examples=["preset:gpt2"],
        description="The model: preset:NAME, bundled:tiny, hub:ORG/NAME@REVISION or path:DIR.",
    )
    models: tuple[ModelName, ...] = Field(
        (),
        max_length=16,
        description="Several models, instead of model: the plan is measured for each, and shown in one table.",
    )
    backend: BackendName = Field("torch", description="The engine that runs the model.")
    endpoint: EndpointName | None = Field(
        None,
        description="The server of the backend endpoint, as URL#MODEL; null for the other backends.",
        examples=["http://127.0.0.1:8000#tiny"],
    )
    device: DeviceKind = Field(
        DeviceKind.CPU,
        description="The kind of device to measure on. Nothing has run on rocm, xpu and mps yet.",
    )
    stack: tuple[AnyTechnique, ...] = Field((), max_length=16, description="The techniques to apply.")
    plan: PlanName = Field(PlanName.SINGLE, description="How the job becomes variants.")
    beside: tuple[Beside, ...] = Field(
        (), max_length=32, description="Other stacks, of any backend, that are measured in the same turns."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of random weights, inputs and drawn tokens.")
    name: str | None = Field(None, min_length=1, max_length=100, description="What the job is called.")
    tags: tuple[Tag, ...] = Field((), max_length=16, description="Words to find the job by.")
    note: str | None = Field(None, max_length=2000, description="Anything worth knowing about the job.")
    measure: Measure = Measure()
    target: JobTarget = JobTarget()
    limits: Limits = Limits()

    def __init__(self, **fields: Any) -> None:
        """Raises FieldsError, a SpecError with a line for each wrong field, as every way to make a request does."""
        with refusing(JobSpec):
            super().__init__(**fields)

    # Validation need not call it: it checks nothing itself.
    __init__.__dict__["__pydantic_base_init__"] = True

    @classmethod
    def model_validate(cls, obj: object, **how: Any) -> Self:
        """Reads a request from Python objects, where "3" is a number as it is on the command line."""
        with refusing(cls):
            return super().model_validate(obj, **how)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **how: Any) -> Self:
        """Reads a request from JSON."""
        with refusing(cls):
            return super().model_validate_json(json_data, **how)

    @field_validator("model")
    @classmethod
    def _canonical_reference(cls, model: str | None) -> str | None:
        return None if model is None else str(_as_value_error(parse_reference, model))

    @field_validator("models")
    @classmethod
    def _canonical_references(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(str(_as_value_error(parse_reference, model)) for model in models)
        twice = next((model for model in found if found.count(model) > 1), None)
        if twice:
            raise ValueError(f"{twice} occurs twice; name it once")
        return found

    @property
    def engine(self) -> str:
        """The backend, and for a server what it serves and where."""
        return engine_name(self.backend, self.endpoint)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The servers that it asks."""
        asked = (self.endpoint, *(each.endpoint for each in self.beside))
        return tuple(dict.fromkeys(filter(None, asked)))

    @property
    def asked_models(self) -> tuple[str | None, ...]:
        """The model or the models, in the order in which they are measured; one None for a workload without any."""
        return self.models or (self.model,)

    @property
    def primary(self) -> str:
        """The metric that its variants are compared by."""
        return LARGEST_BATCH if self.plan is PlanName.BATCH_SCALING else str(self.workload.primary)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _as_value_error(_check_target, self)
        _as_value_error(_check_model, self)
        _as_value_error(_check_meters, self)
        _as_value_error(_check_stacks, self)
        _as_value_error(_check_plan, self)
        _as_value_error(_check_gates, self)
        return self


def _as_value_error(function: Any, *arguments: Any) -> Any:
    """Converts our errors to ValueErrors, which pydantic collects into its report."""
    try:
        return function(*arguments)
    except SpecError as error:
        raise ValueError(str(error)) from error


def _check_target(spec: JobSpec) -> None:
    if spec.device is DeviceKind.CPU and spec.target != JobTarget():
        raise SpecError(
            "target: a job for the cpu cannot ask for a GPU; leave target out, or set device to cuda."
        )


def _check_model(spec: JobSpec) -> None:
    workload: Workload = spec.workload
    if spec.models and spec.model is not None:
        raise SpecError("models: name either model or models; leave one of them out.")
    if not workload.task.needs_model and spec.asked_models != (None,):
        raise SpecError(f"model: {workload.kind} runs no model; leave the field out.")
    if not workload.task.needs_model:
        return
    for model in spec.asked_models:
        if model is None:
            raise SpecError(f"model: {workload.kind} needs a model, for example {workload.example_model}.")
        _check_one_model(workload, model)


def _check_one_model(workload: Workload, model: str) -> None:
    facts = known_facts(parse_reference(model))
    if facts is None:
        return
    for_images = isinstance(facts, ImageFacts)
    if workload.task is not Task.TRAINING and for_images != (workload.task is Task.IMAGES):
        does = "classifies images" if for_images else "generates text"
        raise SpecError(
            f"model: {model} {does}, and {workload.kind} needs another model, for example "
            f"{workload.example_model}."
        )
    problem = workload.check(facts)
    if problem:
        raise SpecError(f"workload: {problem}")
    if workload.has_text and preset_of(parse_reference(model)):
        raise SpecError(
            f"workload.prompt: {model} has random weights and no tokenizer; name a trained model, for example "
            "bundled:tiny, or leave prompt out."
        )


def _check_meters(spec: JobSpec) -> None:
    """Refuses a workload without the meters that it needs, and quality of random weights."""
    needed = (*spec.workload.meters, *(("quality",) if spec.workload.has_labels else ()))
    missing = [meter for meter in needed if meter not in spec.measure.meters]
    if missing:
        raise SpecError(f"measure.meters: {spec.workload.kind} needs the meter {missing[0]!r}; add it.")
    untrained = _untrained(spec)
    if "quality" in needed and untrained:
        example = "hub:microsoft/resnet-50" if spec.workload.has_labels else spec.workload.example_model
        raise SpecError(
            f"model: {untrained} has random weights, whose quality means nothing; name a trained model, for example "
            f"{example}."
        )


def _untrained(spec: JobSpec) -> str | None:
    """The first of the job's models that has random weights, if any."""
    named = (model for model in spec.asked_models if model is not None)
    return next((model for model in named if preset_of(parse_reference(model))), None)


def _check_gates(spec: JobSpec) -> None:
    """Refuses quality limits for a job whose quality cannot be known."""
    if spec.limits.max_kld is None and spec.limits.min_top1 is None:
        return
    if spec.plan is PlanName.BATCH_SCALING:
        raise SpecError("limits: batch_scaling measures no quality; leave max_kld and min_top1 out.")
    if spec.workload.task is Task.TRAINING:
        raise SpecError(
            f"limits: max_kld and min_top1 are of predictions, and {spec.workload.kind} is compared with fp32 by its "
            "losses; leave them out."
        )
    if not spec.workload.task.needs_model or _untrained(spec):
        raise SpecError(
            "limits: max_kld and min_top1 need a trained model, for example bundled:tiny; random weights have no "
            "quality."
        )
    if "quality" not in spec.measure.meters:
        raise SpecError("limits: max_kld and min_top1 need the meter 'quality'; add it to measure.meters.")


def _check_plan(spec: JobSpec) -> None:
    """Refuses a stack for a plan that has its own, a workload that they do not run, and a search of nothing."""
    if spec.limits.max_bytes is not None and spec.plan not in (PlanName.SEARCH, PlanName.BATCH_SCALING):
        raise SpecError(
            "limits.max_bytes: only the plans search and batch_scaling have such a bound; leave it out, or search."
        )
    if spec.plan is PlanName.SEARCH and len(expand_workload(spec.workload)) > 1:
        raise SpecError("workload: a search compares stacks of one workload; ask for one size of each shape.")
    if spec.plan is PlanName.BATCH_SCALING:
        _check_batch_scaling(spec)
    if spec.plan is PlanName.MEMORY_LADDER:
        _check_memory_ladder(spec)


def _check_memory_ladder(spec: JobSpec) -> None:
    if spec.stack:
        raise SpecError(
            "stack: the plan memory-ladder has its own stacks; leave stack out, or measure it with beside."
        )
    if spec.workload.task is not Task.DECODING:
        raise SpecError(
            f"plan: memory-ladder measures models that generate text, not {spec.workload.kind}; it runs "
            f"{', '.join(kinds_with([Task.DECODING]))}."
        )


def _check_batch_scaling(spec: JobSpec) -> None:
    """The plan needs a limit, a workload with a batch that it may choose, and an engine that can run out of memory."""
    if spec.limits.max_bytes is None:
        raise SpecError("limits.max_bytes: batch_scaling needs the memory that it may take, for example 2e9.")
    batch = type(spec.workload).model_fields.get("batch_size")
    if batch is None:
        kinds = (name for name, kind in WORKLOADS.items() if "batch_size" in kind.model_fields)
        raise SpecError(
            f"workload: {spec.workload.kind} has no batch to scale; the valid ones are {', '.join(kinds)}."
        )
    if spec.workload.model_dump()["batch_size"] != batch.default:
        raise SpecError("workload.batch_size: batch_scaling looks for it; leave it out.")
    if any(backend != LIMITED_BACKEND for backend in (spec.backend, *(each.backend for each in spec.beside))):
        raise SpecError(
            f"backend: batch_scaling limits the memory of {LIMITED_BACKEND} alone; name that one."
        )


def _check_stacks(spec: JobSpec) -> None:
    """The job's own stack and those beside it, whose errors begin with their place in the list."""
    # The stack of a search is a menu, whose techniques may exclude each other.
    for stack in [(each,) for each in spec.stack] if spec.plan is PlanName.SEARCH else [spec.stack]:
        _check_stack(spec, stack)
        _check_backend(spec, spec.backend, stack)
    _check_endpoint(spec.backend, spec.endpoint)
    for index, each in enumerate(spec.beside):
        try:
            _check_stack(spec, each.stack)
            _check_backend(spec, each.backend, each.stack)
            _check_endpoint(each.backend, each.endpoint)
        except SpecError as error:
            raise SpecError(f"beside.{index}.{error}") from error


def _check_stack(spec: JobSpec, stack: tuple[Technique, ...]) -> None:
    resolve(stack, spec.workload.kind)
    for technique in stack:
        if spec.workload.task not in technique.tasks:
            raise SpecError(
                f"stack: {technique.name} has no effect on {spec.workload.kind}; it applies to "
                f"{', '.join(kinds_with(technique.tasks))}."
            )
        if spec.device not in technique.devices:
            raise SpecError(f"stack: {technique.not_on(spec.device)}")
        problem = technique.fits(spec.workload)
        if problem:
            raise SpecError(f"stack: {problem}")


def _check_backend(spec: JobSpec, name: str, stack: tuple[Technique, ...]) -> None:
    """Checks that the backend supports the device, the workload and every technique of the resolved stack."""
    backend = BACKENDS[name]
    if spec.device not in backend.devices:
        raise SpecError(
            f"backend: {name} runs on {', '.join(backend.devices)}, not on {spec.device}; ask for another "
            "device."
        )
    problem = backend.supports(spec.workload, None)
    if problem:
        raise SpecError(f"backend: {problem}")
    for technique in resolve(stack, spec.workload.kind):
        if name not in technique.backends:
            raise SpecError(
                f"stack: {technique.name} is for the backend {', '.join(technique.backends)}, not for {name}; "
                "leave it out or name that backend."
            )
        problem = backend.supports(spec.workload, technique)
        if problem:
            raise SpecError(f"stack: {problem}")


def _check_endpoint(backend: str, endpoint: str | None) -> None:
    """A server's address belongs to the one backend that asks servers."""
    if backend == ENDPOINT and endpoint is None:
        raise SpecError(
            "endpoint: the backend endpoint asks a server; name it as URL#MODEL, for example "
            "http://127.0.0.1:8000#tiny."
        )
    if backend != ENDPOINT and endpoint is not None:
        raise SpecError(
            f"endpoint: {backend} asks no server; leave endpoint out, or set backend to endpoint."
        )


def resolve(stack: Iterable[Technique], workload: str) -> tuple[Technique, ...]:
    """The stack with what it requires for that kind of workload, in the order of the phases.

    Raises SpecError when a technique is there twice or two exclude each other.
    """
    chosen: dict[str, Technique] = {}
    for technique in stack:
        if technique.name in chosen:
            raise SpecError(f"stack: {technique.name} occurs twice; name it once.")
        chosen[technique.name] = technique
    queue = list(chosen.values())
    while queue:
        for name in queue.pop().requires:
            if name not in chosen and WORKLOADS[workload].task in TECHNIQUES[name].tasks:
                chosen[name] = TECHNIQUES[name](name=name)
                queue.append(chosen[name])
    _refuse_conflicts(chosen)
    return tuple(sorted(chosen.values(), key=lambda technique: (technique.phase, technique.name)))


def _refuse_conflicts(chosen: dict[str, Technique]) -> None:
    for one, other in combinations(chosen.values(), 2):
        reason = conflict_between(one, other)
        if reason:
            raise SpecError(
                f"stack: {one.name} and {other.name} exclude each other ({reason}); keep one of them."
            )


def digest(document: Any) -> str:
    """SHA-256 of a document's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def expand_workload(workload: Workload) -> tuple[Workload, ...]:
    """The single workloads of a request's workload, without repetitions."""
    return tuple(dict.fromkeys(workload.expand()))
