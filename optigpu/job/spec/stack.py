"""The names in a request, and its stacks: with what they require, and whether the job can run them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, core_schema

from optigpu.backends import BACKENDS
from optigpu.documents.endpoints import ENDPOINT, parse_endpoint
from optigpu.meters import METER_NAMES
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique, conflict_between
from optigpu.vocabulary import SpecError, as_value_error
from optigpu.workloads import WORKLOADS, kinds_with

if TYPE_CHECKING:
    from optigpu.job.spec.job_spec import JobSpec


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
