"""What calls are given: parameters that several share, the refusal of those that a call does not have, and bodies,
whose length is limited and which are validated by the model of the call."""

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn, TypeVar

import structlog
from fastapi import Depends, Path, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, Field, JsonValue, TypeAdapter, ValidationError, WithJsonSchema
from starlette.requests import ClientDisconnect

from api.auth import Administrator, Submitter
from api.gate import Caller
from api.problems import ProblemError, summary
from api.service import ServiceDep
from optigpu.documents.events import Estimated, PlannedVariant
from optigpu.documents.fields import MOST_ERRORS, WHOLE, FieldsError, fields_of, line, unknown
from optigpu.documents.queries import PRINTABLE
from optigpu.documents.versions import RUN_FORMAT, RunDocument
from optigpu.job.measured import unplanned
from optigpu.job.plan import variants_of
from optigpu.job.search import foreseen
from optigpu.job.spec import JobSpec, Variant
from optigpu.store.withdrawals import Withdrawal
from optigpu.variables import hub_refusal
from optigpu.vocabulary import Frozen, SpecError, VariantStatus, is_id

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


BODY_WITHIN_S = 60.0
SLOWEST_BYTES_PER_S = 100_000
"""How long a body may take: the first, and for each byte of the limit more. Without an end a client that sends a byte a
second would hold its connection for ever."""


async def job_body(request: Request, service: ServiceDep, _: Submitter) -> bytes:
    """The body of a call that submits a job or a model's manifest."""
    return await json_body(request, service.settings.max_body_bytes)


async def run_body(request: Request, service: ServiceDep, _: Administrator) -> bytes:
    """The body of a call that imports a run, whose raw samples may be long."""
    return await json_body(request, service.settings.max_import_bytes)


async def admin_body(request: Request, service: ServiceDep, _: Administrator) -> bytes:
    """The body of a call that only an administrator may make."""
    return await json_body(request, service.settings.max_body_bytes)


async def json_body(request: Request, limit: int) -> bytes:
    """Refuses other media types (415), bodies that are too long (413) and those that take too long (408)."""
    if media_type_of(request) != "application/json":
        raise ProblemError(415, "Send the body as JSON with the header Content-Type: application/json.")
    return await body_of(request, limit)


def media_type_of(request: Request) -> str:
    """What the client says that its body is, in lower case and without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def body_of(request: Request, limit: int) -> bytes:
    """The whole body. Refuses one that is compressed (415), too long (413) or takes too long (408)."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ProblemError(415, "Send the body uncompressed, without the header Content-Encoding.")
    within_s = BODY_WITHIN_S + limit / SLOWEST_BYTES_PER_S
    try:
        async with asyncio.timeout(within_s):
            return await _read(request, limit)
    except TimeoutError:
        raise ProblemError(
            408, f"The body did not arrive within {within_s:.0f} s.", headers={"Connection": "close"}
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    announced = request.headers.get("content-length", "")
    too_long = announced.isdecimal() and int(announced[:20]) > limit
    try:
        async for chunk in request.stream():
            too_long = too_long or len(body) + len(chunk) > limit
            if too_long:
                raise ProblemError(413, f"The body is longer than {limit} bytes.")
            body += chunk
    except ClientDisconnect:
        raise ProblemError(400, "The connection ended before the body did.") from None
    return bytes(body)


class JobPreview(Frozen):
    """A job that was not stored: the request with all defaults, its variants, and about how long it would take."""

    spec: dict[str, JsonValue]
    variants: tuple[PlannedVariant, ...]
    seconds: float
    sentence: str


@dataclass(frozen=True)
class PostedJob:
    """A job that was posted, the variants that it is made of, and how long they will take."""

    spec: JobSpec
    variants: Sequence[Variant]
    estimate: Estimated

    def preview(self) -> JobPreview:
        """The same, for people."""
        planned = (PlannedVariant(index=v.index, role=v.role, label=v.label) for v in self.variants)
        return JobPreview(
            spec=self.spec.model_dump(mode="json"),
            variants=tuple(planned),
            seconds=self.estimate.seconds,
            sentence=self.estimate.sentence,
        )


def job_of(document: object) -> PostedJob:
    """The job of a JSON document. Raises ProblemError 422 for one that can never run."""
    return posted_job(json.dumps(document).encode())


def posted_job(body: bytes) -> PostedJob:
    """The job that was posted. Raises ProblemError 400 for invalid JSON, 422 for a job that can never run."""
    spec = strict_document(body, JobSpec)
    try:
        variants = variants_of(spec)
        _require_allowed(variants)
        _, estimate = foreseen(spec, variants)
    except FieldsError as error:
        raise ProblemError(422, summary(error.entries), error.entries) from None
    except SpecError as error:
        entries = [fields_of(JobSpec).named(str(error))]
        raise ProblemError(422, summary(entries), entries) from None
    return PostedJob(spec, variants, estimate)


JobBody = Annotated[bytes, Depends(job_body)]


def _require_allowed(variants: Sequence[Variant]) -> None:
    """Raises SpecError for a model of the hub that the service's settings do not allow."""
    for variant in variants:
        for repository in variant.hub_repositories:
            if refusal := hub_refusal(repository):
                raise SpecError(f"model: {refusal}")


@dataclass(frozen=True)
class ImportedRun:
    """A run, and its request as this version reads it."""

    run: RunDocument
    spec: JobSpec


def posted_run(body: Annotated[bytes, Depends(run_body)]) -> ImportedRun:
    """The run that was posted. Raises ProblemError 400 for invalid JSON, 422 for one that cannot be stored."""
    run = _validated(body, RunDocument, strict=False)
    if run.format > RUN_FORMAT:
        _refuse_run(
            "format",
            f"The run was written by a later version of OptiGPU (format {run.format}); update this one.",
        )
    try:
        spec = JobSpec.model_validate(run.spec)
        variants = variants_of(spec)
    except FieldsError as error:
        _refuse_run("spec", f"This version cannot read the run's request: {line(error.entries[0])}")
    except SpecError as error:
        _refuse_run("spec", f"This version cannot plan the run: {error}")
    _require_planned(run, variants)
    return ImportedRun(run, spec)


PostedRun = Annotated[ImportedRun, Depends(posted_run)]


def _require_planned(run: RunDocument, variants: Sequence[Variant]) -> None:
    """Refuses results that are not of the run's own request, and outcomes that do not tell of them."""
    for result in run.results:
        if why := unplanned(result, variants):
            _refuse_run(
                "results",
                f"The result {result.id} is not one of the variants that the run's request plans: {why}.",
            )
    planned = [variant.index for variant in variants]
    for field, indexes in (("outcomes", run.outcomes), ("attribution", run.attribution.rows)):
        if unknown := [each.index for each in indexes if each.index not in planned]:
            _refuse_run(field, f"The run's request plans no variant {unknown[0]}.")
    succeeded = [each.index for each in run.outcomes if each.status is VariantStatus.SUCCEEDED]
    measured = [result.variant.index for result in run.results]
    if sorted(measured) != sorted(succeeded):
        _refuse_run(
            "outcomes",
            f"The run has results of the variants {measured}, and by its outcomes {succeeded} succeeded.",
        )


def _refuse_run(field: str, message: str) -> NoReturn:
    raise ProblemError(422, message, [{"field": field, "message": message}])


def strict_document(body: bytes, model: type[Model]) -> Model:
    """What a body says, with every value of the very type that the model has.

    Raises ProblemError 400 for invalid JSON, 422 with each field that is wrong.
    """
    return _validated(body, model, strict=True)


def _validated(body: bytes, model: type[Model], *, strict: bool) -> Model:
    try:
        return TypeAdapter(model).validate_json(body, strict=strict)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if errors[0]["type"] == "json_invalid":
        message = f"The body is not JSON: {errors[0]['ctx']['error']}."
        raise ProblemError(400, message, [{"field": WHOLE, "message": message}])
    entries = fields_of(model).describe(errors)
    raise ProblemError(422, summary(entries), entries)
