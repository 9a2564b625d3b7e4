"""The OpenAPI document: FastAPI's own, with the bodies that calls read by themselves and problems for all errors."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api.examples import JOBS, Example
from api.links import links_of
from api.problems import MEDIA_TYPE
from optigpu import __version__
from optigpu.documents.administration import AlertRequest, WebhookRequest
from optigpu.documents.devices import ClaimRequest, DeviceMessage, KeyRequest, RunRequest
from optigpu.documents.manifest import ModelManifest
from optigpu.documents.pilots import PilotBeat, PilotEnd, PilotEvent, PilotOutcome
from optigpu.documents.views import EventView, Problem
from optigpu.job.spec import JobSpec
from optigpu.store.workers import WorkerInfo

REFERENCE = "#/components/schemas/{model}"
TAGS = [
    {"name": "jobs", "description": "Submit a job and follow it."},
    {"name": "results", "description": "What was measured, with its raw samples."},
    {"name": "leaderboard", "description": "The current results, ranked."},
    {"name": "devices", "description": "Edge devices, their signed reports, and the models they report on."},
    {"name": "workers", "description": "The workers and what they can run."},
    {
        "name": "pilots",
        "description": "For the pilots of a cluster's scheduler, each with the token of its job.",
    },
    {"name": "administration", "description": "The audit log, webhooks, and alert rules."},
    {"name": "schema", "description": "What a job can contain."},
    {"name": "health", "description": "Liveness, readiness and Prometheus metrics."},
]
DESCRIPTION = (
    "What does each optimization layer buy on your hardware, alone and stacked? POST a job, follow its events, read "
    "the leaderboard. Times are UTC, numbers are in SI units, every error is a problem document (RFC 9457)."
)
OURS = (
    *(JobSpec, Problem, EventView),
    *(ClaimRequest, RunRequest, DeviceMessage, KeyRequest, ModelManifest, WebhookRequest, AlertRequest),
    *(WorkerInfo, PilotBeat, PilotEvent, PilotOutcome, PilotEnd),
)
"""Schemas that FastAPI cannot derive: bodies that are read by themselves, errors, messages of a stream."""

Responses = dict[int | str, dict[str, Any]]


def schema_of(model: type[BaseModel]) -> dict[str, str]:
    """The reference to one of OURS."""
    return {"$ref": REFERENCE.format(model=model.__name__)}


def problems(*statuses: int) -> Responses:
    """The documentation of a call's errors; what every call can answer is added."""
    content = {MEDIA_TYPE: {"schema": schema_of(Problem)}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in sorted({*statuses, 400, 500, 503})
    }


GUARDED = problems(401, 403, 422, 429)
"""The errors of every call that reads or changes something."""


def posted(model: type[BaseModel], examples: Mapping[str, Example]) -> dict[str, object]:
    """The documentation of a body that a call reads by itself: one of OURS, with examples."""
    shown = {
        name: {"summary": example.summary, "value": example.document} for name, example in examples.items()
    }
    content = {"schema": schema_of(model), "examples": shown}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


POSTED_JOB = posted(JobSpec, JOBS)


class DocumentedApp(FastAPI):
    """An application whose `/openapi.json` is the document of this module."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = _document(self)
        return self.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="OptiGPU", version=__version__, description=DESCRIPTION, routes=app.routes, tags=TAGS
    )
    schemas = document["components"]["schemas"]
    for model in OURS:
        schema = model.model_json_schema(ref_template=REFERENCE)
        for name, definition in (schema.pop("$defs", {}) | {model.__name__: schema}).items():
            schemas.setdefault(name, definition)
    for operation in (each for methods in document["paths"].values() for each in methods.values()):
        for status, answer in operation["responses"].items():
            if links := links_of(operation["operationId"], status):
                answer["links"] = links
    return document
