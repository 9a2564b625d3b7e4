"""Reads the body of a POST: limits its length, parses strict JSON, validates the job."""

import json
from dataclasses import dataclass
from typing import Annotated, NoReturn

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from api.auth import Administrator, Submitter
from api.fields import Fields
from api.problems import ProblemError, summary
from api.service import ServiceDep
from optigpu.documents.runs import RUN_FORMAT, RunDocument
from optigpu.job.estimate import plan_time
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import SpecError

SPEC_FIELDS, RUN_FIELDS = Fields(JobSpec), Fields(RunDocument)


async def job_body(request: Request, service: ServiceDep, _: Submitter) -> bytes:
    """The body of a call that submits a job."""
    return await _json_body(request, service.settings.max_body_bytes)


async def run_body(request: Request, service: ServiceDep, _: Administrator) -> bytes:
    """The body of a call that imports a run, whose raw samples may be long."""
    return await _json_body(request, service.settings.max_import_bytes)


async def _json_body(request: Request, limit: int) -> bytes:
    """Refuses other media types (415) and bodies that are too long (413)."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ProblemError(415, "Send the body as JSON with the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ProblemError(415, "Send the body uncompressed, without the header Content-Encoding.")
    return await _read(request, limit)


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


def posted_spec(body: Annotated[bytes, Depends(job_body)]) -> JobSpec:
    """The job that was posted. Raises ProblemError 400 for invalid JSON, 422 for a job that can never run."""
    _check_json(body)
    try:
        spec = JobSpec.model_validate_json(body, strict=True)
    except ValidationError as error:
        _refuse(SPEC_FIELDS, error)
    try:
        plan_time(spec, variants_of(spec))
    except SpecError as error:
        entries = [SPEC_FIELDS.named(str(error))]
        raise ProblemError(422, summary(entries), entries) from None
    return spec


PostedSpec = Annotated[JobSpec, Depends(posted_spec)]


@dataclass(frozen=True)
class ImportedRun:
    """A run, and its request as this version reads it."""

    run: RunDocument
    spec: JobSpec


def posted_run(body: Annotated[bytes, Depends(run_body)]) -> ImportedRun:
    """The run that was posted. Raises ProblemError 400 for invalid JSON, 422 for one that cannot be stored."""
    _check_json(body)
    try:
        run = RunDocument.model_validate_json(body)
    except ValidationError as error:
        _refuse(RUN_FIELDS, error)
    if run.format > RUN_FORMAT:
        _refuse_run(
            "format",
            f"The run was written by a later version of OptiGPU (format {run.format}); update this one.",
        )
    try:
        spec = JobSpec.model_validate(run.spec)
        planned = {each.index: (each.workload_digest, each.workload.kind) for each in variants_of(spec)}
    except ValidationError as error:
        first = SPEC_FIELDS.describe(error.errors(include_url=False, include_input=False))[0]
        _refuse_run(
            "spec", f"This version cannot read the run's request: {first['field']}: {first['message']}"
        )
    except SpecError as error:
        _refuse_run("spec", f"This version cannot plan the run: {error}")
    for result in run.results:
        variant = result.variant
        if planned.get(variant.index) != (variant.workload_digest, variant.workload.get("kind")):
            _refuse_run(
                "results", f"The result {result.id} is not one of the variants that the run's request plans."
            )
    return ImportedRun(run, spec)


PostedRun = Annotated[ImportedRun, Depends(posted_run)]


def _refuse(fields: Fields, error: ValidationError) -> NoReturn:
    entries = fields.describe(error.errors(include_url=False, include_input=False))
    raise ProblemError(422, summary(entries), entries) from None


def _refuse_run(field: str, message: str) -> NoReturn:
    raise ProblemError(422, message, [{"field": field, "message": message}])


def _check_json(body: bytes) -> None:
    """Refuses what a lenient parser accepts: NaN, duplicate keys, text that is not UTF-8."""
    try:
        json.loads(body.decode(), parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    except UnicodeDecodeError as error:
        _malformed(f"The body is not UTF-8 at byte {error.start}.")
    except json.JSONDecodeError as error:
        _malformed(f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}.")
    except RecursionError:
        _malformed("The body is nested too deeply.")
    except ValueError as error:
        _malformed(f"The body is not valid JSON: {error}")


def _malformed(message: str) -> NoReturn:
    raise ProblemError(400, message, [{"field": "body", "message": message}]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number.")


def _no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document: dict[str, object] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key {key[:80]!r} occurs twice.")
        document[key] = value
    return document
