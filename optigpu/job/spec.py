"""A job as it is posted, validated completely before anything is stored or run, and the variants that it is made of.

Its conditions are how it is measured, on which worker, and within which limits. These are part of no digest. Errors of
the request itself are found here; a problem of the machine ends only the variant that it concerns.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AwareDatetime, Field, field_validator, model_validator

from optigpu.documents.endpoints import engine_name
from optigpu.documents.facts import ImageFacts
from optigpu.documents.fields import refusing
from optigpu.job.variant import LARGEST_BATCH as LARGEST_BATCH
from optigpu.job.variant import BackendName, EndpointName, MeterName, ModelName, check_stacks
from optigpu.job.variant import PlanName as PlanName
from optigpu.job.variant import Tag as Tag
from optigpu.job.variant import Variant as Variant
from optigpu.job.variant import digest as digest
from optigpu.job.variant import expand_workload as expand_workload
from optigpu.job.variant import resolve as resolve
from optigpu.meters.base import QualityOptions
from optigpu.models.described import known_facts
from optigpu.models.reference import parse_reference, preset_of
from optigpu.techniques import AnyTechnique
from optigpu.vocabulary import DeviceKind, Frozen, Scheduler, SpecError, Task, as_value_error
from optigpu.workloads import WORKLOADS, AnyWorkload, kinds_with
from optigpu.workloads.base import Workload

Seconds = Annotated[float, Field(gt=0, le=86400)]


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(
            "this time is before the first year or after the last one that can be kept"
        ) from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time with its zone, kept in UTC."""


MIN_SECONDS = 5.0


class Measure(Frozen):
    """How to measure. It is part of no digest: it changes the precision of a figure, not the measured thing.

    `rel_ci` is the width of the median's 95% interval, relative to it, at which sampling may stop.
    """

    replicates: int = Field(3, ge=1, le=50, description="How many processes measure each variant.")
    max_seconds: Seconds = Field(120.0, description="How long a process is measured at most.")
    min_seconds: Seconds = Field(
        default_factory=lambda known: min(MIN_SECONDS, known.get("max_seconds", MIN_SECONDS)),
        description="How long a process is measured at least; by default 5 s, or max_seconds if that is less.",
        json_schema_extra={"default": MIN_SECONDS},
    )
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
            raise ValueError(
                f"min_seconds, {self.min_seconds:g}, must not exceed max_seconds, {self.max_seconds:g}; lower it too"
            )
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
    deadline: Moment | None = Field(
        None,
        description="When the job must have ended, as 2026-01-31T18:00:00Z: one that has not begun by then fails, and "
        "one that runs has time until then.",
    )
    wait_for_quiet_s: float = Field(
        5.0,
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


PLANS = (
    "How the job becomes variants. single: the stack. ladder: the baseline, each technique alone, and each prefix of "
    "the stack. ablation: the same, and the stack without each. grid: every combination. memory-ladder: stacks of its "
    "own that need less and less memory. search: halving among the combinations. batch_scaling: the largest batch "
    "under a limit."
)


class Beside(Frozen):
    """A stack of any backend that is measured in the same turns as the job's own variants.

    `label` names its variant in tables; None makes one of the backend and the techniques. `endpoint` is the server of
    the backend endpoint.
    """

    backend: BackendName = "torch"
    endpoint: EndpointName | None = None
    stack: tuple[AnyTechnique, ...] = Field((), max_length=16)
    label: str | None = Field(None, min_length=1, max_length=100)


class JobSpec(Frozen):
    """One request to measure. A job for `device` "cuda" waits for a worker that has one.

    `beside` names other stacks, of this backend or others, that run the same workload on the same model and device: the
    processes of all variants take turns, so that their ratios hold on a machine whose speed drifts. With `models` in
    the place of `model` the plan is measured for each of them, with a baseline and gains of its own. `name`, `tags` and
    `note` are for people, `priority`, `fresh` and `via` for a service: they change nothing of what is measured, and are
    in no digest.
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
    plan: PlanName = Field(PlanName.SINGLE, description=PLANS)
    beside: tuple[Beside, ...] = Field(
        (), max_length=32, description="Other stacks, of any backend, that are measured in the same turns."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of random weights, inputs and drawn tokens.")
    name: str | None = Field(None, min_length=1, max_length=100, description="What the job is called.")
    tags: tuple[Tag, ...] = Field((), max_length=16, description="Words to find the job by.")
    priority: int = Field(
        0,
        ge=-10,
        le=10,
        description="How soon a worker takes the job: one of a higher priority first. Above 0 needs an admin's key.",
    )
    fresh: bool = Field(
        False,
        description="Whether a service measures the job even if it has results of the very same measurement.",
    )
    via: Literal[Scheduler.SLURM] | None = Field(
        None,
        description="The scheduler of a cluster that runs the job; null: a worker of the service takes it.",
    )
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
        with refusing(cls):
            return super().model_validate_json(json_data, **how)

    @field_validator("model")
    @classmethod
    def _canonical_reference(cls, model: str | None) -> str | None:
        return None if model is None else str(as_value_error(parse_reference, model))

    @field_validator("models")
    @classmethod
    def _canonical_references(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(str(as_value_error(parse_reference, model)) for model in models)
        twice = next((model for model in found if found.count(model) > 1), None)
        if twice:
            raise ValueError(f"{twice} occurs twice; name it once")
        return found

    @property
    def engine(self) -> str:
        return engine_name(self.backend, self.endpoint)

    @property
    def endpoints(self) -> tuple[str, ...]:
        asked = (self.endpoint, *(each.endpoint for each in self.beside), self.measure.quality.reference)
        return tuple(dict.fromkeys(filter(None, asked)))

    @property
    def asked_models(self) -> tuple[str | None, ...]:
        """The model or the models, in the order in which they are measured; one None for a workload without any."""
        return self.models or (self.model,)

    @property
    def primary(self) -> str:
        return LARGEST_BATCH if self.plan is PlanName.BATCH_SCALING else str(self.workload.primary)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        as_value_error(check, self)
        return self


LIMITED_BACKEND = "torch"
"""The engine whose memory the plan batch_scaling can limit, and that goes on after it ran out."""


def check(spec: "JobSpec") -> None:
    """Raises SpecError for the first field that does not fit the others."""
    if spec.device is DeviceKind.CPU and spec.target != JobTarget():
        raise SpecError(
            "target: a job for the cpu cannot ask for a GPU; leave target out, or set device to cuda."
        )
    _check_model(spec)
    _check_meters(spec)
    check_stacks(spec)
    _check_plan(spec)
    _check_gates(spec)


def _check_model(spec: "JobSpec") -> None:
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
    if problem := workload.check(facts):
        raise SpecError(f"workload: {problem}")
    if workload.has_text and preset_of(parse_reference(model)):
        raise SpecError(
            f"workload.prompt: {model} has random weights and no tokenizer; name a trained model, for example "
            "bundled:tiny, or leave prompt out."
        )


def _check_meters(spec: "JobSpec") -> None:
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


def _untrained(spec: "JobSpec") -> str | None:
    named = (model for model in spec.asked_models if model is not None)
    return next((model for model in named if preset_of(parse_reference(model))), None)


def _check_gates(spec: "JobSpec") -> None:
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


def _check_plan(spec: "JobSpec") -> None:
    if spec.limits.max_bytes is not None and spec.plan not in (PlanName.SEARCH, PlanName.BATCH_SCALING):
        raise SpecError(
            "limits.max_bytes: only the plans search and batch_scaling have such a bound; leave it out, or search."
        )
    if spec.plan is PlanName.SEARCH and len(expand_workload(spec.workload)) > 1:
        raise SpecError("workload: a search compares stacks of one workload; ask for one size of each shape.")
    if spec.plan is PlanName.BATCH_SCALING:
        _check_batch_scaling(spec)
    if spec.plan is PlanName.MEMORY_LADDER and spec.stack:
        raise SpecError(
            "stack: the plan memory-ladder has its own stacks; leave stack out, or measure it with beside."
        )
    if spec.plan is PlanName.MEMORY_LADDER and spec.workload.task is not Task.DECODING:
        raise SpecError(
            f"plan: memory-ladder measures models that generate text, not {spec.workload.kind}; it runs "
            f"{', '.join(kinds_with([Task.DECODING]))}."
        )


def _check_batch_scaling(spec: "JobSpec") -> None:
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
