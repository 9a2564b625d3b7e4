"""A job as it is posted, validated completely before anything is stored or run."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from optigpu.documents.endpoints import engine_name
from optigpu.documents.fields import refusing
from optigpu.job.spec.checks import check
from optigpu.job.spec.conditions import JobTarget, Limits, Measure
from optigpu.job.spec.names import BackendName, EndpointName, ModelName, PlanName, Tag, as_value_error
from optigpu.job.spec.variant import LARGEST_BATCH
from optigpu.models.reference import parse_reference
from optigpu.techniques import AnyTechnique
from optigpu.vocabulary import DeviceKind, Frozen, Scheduler
from optigpu.workloads import AnyWorkload

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
        """Reads a request from JSON."""
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
        as_value_error(check, self)
        return self
