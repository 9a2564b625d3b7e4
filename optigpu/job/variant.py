"""The names in a request, stacks with what they require, and variants.

A variant is what a job measures; its digests say what it can be compared with.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, core_schema

from optigpu.backends import BACKENDS
from optigpu.documents.endpoints import ENDPOINT, engine_name, parse_endpoint
from optigpu.meters import METER_NAMES
from optigpu.models.reference import parse_reference
from optigpu.techniques import TECHNIQUES, AnyTechnique
from optigpu.techniques.base import Technique, conflict_between
from optigpu.vocabulary import DeviceKind, Frozen, Role, SpecError, as_value_error, canonical_json
from optigpu.workloads import WORKLOADS, AnyWorkload, kinds_with
from optigpu.workloads.base import Workload

if TYPE_CHECKING:
    from optigpu.job.spec import JobSpec


def resolve(stack: Iterable[Technique], workload: str) -> tuple[Technique, ...]:
    """The stack with what it requires for that kind of workload, in the order of the phases. Raises SpecError when a
    technique is there twice or two exclude each other."""
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
    for one, other in combinations(chosen.values(), 2):
        if reason := conflict_between(one, other):
            raise SpecError(
                f"stack: {one.name} and {other.name} exclude each other ({reason}); keep one of them."
            )
    return tuple(sorted(chosen.values(), key=lambda technique: (technique.phase, technique.name)))


def check_stacks(spec: "JobSpec") -> None:
    """The job's own stack and those beside it, whose errors begin with their place in the list."""
    # The stack of a search is a menu, whose techniques may exclude each other.
    for stack in [(each,) for each in spec.stack] if spec.plan is PlanName.SEARCH else [spec.stack]:
        _check_stack(spec, spec.backend, stack)
    _check_endpoint(spec.backend, spec.endpoint)
    for index, each in enumerate(spec.beside):
        try:
            _check_stack(spec, each.backend, each.stack)
            _check_endpoint(each.backend, each.endpoint)
        except SpecError as error:
            raise SpecError(f"beside.{index}.{error}") from error


def _check_stack(spec: "JobSpec", name: str, stack: tuple[Technique, ...]) -> None:
    """Checks that the workload, the device and the backend take every technique of the resolved stack."""
    resolved = resolve(stack, spec.workload.kind)
    for technique in stack:
        if spec.workload.task not in technique.tasks:
            raise SpecError(
                f"stack: {technique.name} has no effect on {spec.workload.kind}; it applies to "
                f"{', '.join(kinds_with(technique.tasks))}."
            )
        if spec.device not in technique.devices:
            raise SpecError(f"stack: {technique.not_on(spec.device)}")
        if problem := technique.fits(spec.workload):
            raise SpecError(f"stack: {problem}")
    backend = BACKENDS[name]
    if spec.device not in backend.devices:
        raise SpecError(
            f"backend: {name} runs on {', '.join(backend.devices)}, not on {spec.device}; ask for another "
            "device."
        )
    if problem := backend.supports(spec.workload, None):
        raise SpecError(f"backend: {problem}")
    for technique in resolved:
        if name not in technique.backends:
            raise SpecError(
                f"stack: {technique.name} is for the backend {', '.join(technique.backends)}, not for {name}; "
                "leave it out or name that backend."
            )
        if problem := backend.supports(spec.workload, technique):
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


@dataclass(frozen=True)
class OneOf:
    """Validates a string as a Literal of these names would, which a registry knows and a type cannot."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.names))


MeterName = Annotated[str, OneOf(METER_NAMES)]
BackendName = Annotated[str, OneOf(tuple(BACKENDS))]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Tag = Annotated[str, StringConstraints(pattern=r"^[\w.:/-]{1,50}$")]


class PlanName(StrEnum):
    """How a job becomes variants."""

    SINGLE = "single"
    LADDER = "ladder"
    ABLATION = "ablation"
    GRID = "grid"
    MEMORY_LADDER = "memory-ladder"
    SEARCH = "search"
    BATCH_SCALING = "batch_scaling"


EndpointName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=500),
    AfterValidator(lambda text: str(as_value_error(parse_endpoint, text))),
]


LARGEST_BATCH = "largest_batch"
"""The metric of the plan batch_scaling."""
HUB = "hub:"
"""How references to the hub begin."""


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
        return self.workload.primary if self.memory_limit_bytes is None else LARGEST_BATCH

    @property
    def compiles(self) -> bool:
        """Whether its first request compiles or captures."""
        return self.workload.compiles or any(technique.phase.compiles for technique in self.stack)

    @property
    def engine(self) -> str:
        return engine_name(self.backend, self.endpoint)

    @property
    def hub_repositories(self) -> tuple[str, ...]:
        """The repositories of the hub that it loads: its model, and those that its techniques name, such as a draft."""
        values = (value for technique in self.stack for value in technique.model_dump().values())
        named = (name for name in (self.model, *values) if isinstance(name, str) and name.startswith(HUB))
        return tuple(dict.fromkeys(parse_reference(name).name for name in named))

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


def digest(document: Any) -> str:
    """SHA-256 of a document's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def expand_workload(workload: Workload) -> tuple[Workload, ...]:
    """The single workloads of a request's workload, without repetitions."""
    return tuple(dict.fromkeys(workload.expand()))
