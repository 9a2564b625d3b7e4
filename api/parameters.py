"""Parameters that several calls share, and the refusal of those that a call does not have."""

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, TypeVar

import structlog
from fastapi import Depends, Path, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, Field, ValidationError, WithJsonSchema

from api.callers import Caller
from api.problems import ProblemError, summary
from optigpu.documents.fields import MOST_ERRORS, unknown
from optigpu.documents.queries import PRINTABLE
from optigpu.store.withdrawals import Withdrawal
from optigpu.vocabulary import Frozen, is_id

Model = TypeVar("Model", bound=BaseModel)


def _canonical(text: str) -> str:
    if not is_id(text):
        raise ValueError("This is not a UUID; an id looks like 0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11.")
    return text.lower()


Uuid = Annotated[str, AfterValidator(_canonical), WithJsonSchema({"type": "string", "format": "uuid"})]
Id = Annotated[Uuid, Path(alias="id", description="A UUID, as the call that made it returned it.")]


async def _of_the_log(job_id: Id) -> str:
    """Notes the job in every later log line of the request."""
    structlog.contextvars.bind_contextvars(job_id=job_id)
    return job_id


JobId = Annotated[str, Depends(_of_the_log)]
"""The id of a job."""


Cursor = Annotated[
    str, Field(max_length=500, pattern=PRINTABLE, description="`next_cursor` of the page before.")
]
Limit = Annotated[int, Field(ge=1, le=200, description="The largest number of rows to return.")]


class Withdrawing(Frozen):
    """Why something is withdrawn."""

    reason: Annotated[
        str,
        Field(
            max_length=500,
            pattern=r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$",
            description="A sentence for those who look for it later.",
        ),
    ]

    def by(self, who: Caller) -> Withdrawal:
        """The same, with the one who withdraws."""
        return Withdrawal(reason=self.reason, withdrawn_by=who.name, key_id=who.key.id if who.key else None)


async def any_parameters() -> None:
    """A call that depends on this looks by itself at what it is given."""


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuses a query parameter that the call does not have, as a body's unknown fields are refused."""
    dependant = request.scope["route"].dependant
    if any(needed.call is any_parameters for needed in dependant.dependencies):
        return
    _refuse_unknown(request.query_params, set(_query_parameters(dependant)))


def parameters_of(request: Request, kind: type[Model]) -> Model:
    """What a call is given that has no other parameters than the fields of this model.

    FastAPI reads and refuses the same, but for each request looks again at what each of twenty fields is.
    Raises ProblemError, RequestValidationError.
    """
    given = request.query_params
    _refuse_unknown(given, kind.model_fields)
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([each | {"loc": ("query", *each["loc"])} for each in errors]) from None


def _refuse_unknown(given: Iterable[str], valid: Collection[str]) -> None:
    entries = [
        unknown([name], "parameter", name, valid) for name in dict.fromkeys(given) if name not in valid
    ][:MOST_ERRORS]
    if entries:
        raise ProblemError(422, summary(entries), entries)


def _query_parameters(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a call and of what it depends on; those in a model by the model's fields."""
    for parameter in dependant.query_params:
        kind = parameter.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from kind.model_fields
        else:
            yield parameter.alias
    for needed in dependant.dependencies:
        yield from _query_parameters(needed)
