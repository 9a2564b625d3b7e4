"""The names that a job's fields may have."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, core_schema

from optigpu.backends import BACKENDS
from optigpu.documents.endpoints import parse_endpoint
from optigpu.meters import METER_NAMES
from optigpu.vocabulary import SpecError


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


def as_value_error(function: Any, *arguments: Any) -> Any:
    """Converts our errors to ValueErrors, which pydantic collects into its report."""
    try:
        return function(*arguments)
    except SpecError as error:
        raise ValueError(str(error)) from error


def _canonical_endpoint(text: str | None) -> str | None:
    return None if text is None else str(as_value_error(parse_endpoint, text))


EndpointName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=500),
    AfterValidator(_canonical_endpoint),
]
