"""The OpenAPI document: FastAPI's own, with the bodies that calls read by themselves and problems for all errors.

Its links say which field of an answer is which parameter of another call: a client that follows them comes from a
posted job to its results, and from a row of the leaderboard to raw samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api.device_messages import ClaimRequest, DeviceMessage, KeyRequest, RunRequest
from api.examples import JOBS, Example
from api.problems import MEDIA_TYPE
from optigpu import __version__
from optigpu.documents.administration import AlertRequest, WebhookRequest
from optigpu.documents.events import PilotBeat, PilotEnd, PilotEvent, PilotOutcome
from optigpu.documents.manifest import ModelManifest
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
ID = "$response.body#/id"
SAME_ID = "$request.path.id"
NEW_JOB = ("submit_job", 202), ("import_run", 201)


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


@dataclass(frozen=True)
class Link:
    """From an answer of one call to another call, by the ids that both have."""

    source: str
    status: int
    target: str
    parameters: Mapping[str, str]

    def document(self) -> dict[str, object]:
        """The link object of the OpenAPI specification."""
        return {"operationId": self.target, "parameters": dict(self.parameters)}


def _links(source: str, status: int, parameters: Mapping[str, str], *targets: str) -> tuple[Link, ...]:
    """Links to several calls that take the same parameters."""
    return tuple(Link(source, status, target, parameters) for target in targets)


OF_A_JOB = "get_job", "follow_job", "get_job_results", "cancel_job", "withdraw_job"
OF_A_RESULT = "get_result", "get_samples", "list_artifacts", "withdraw_result"
LINKS = (
    *(link for source, status in NEW_JOB for link in _links(source, status, {"id": ID}, *OF_A_JOB)),
    *_links("list_jobs", 200, {"id": "$response.body#/jobs/0/id"}, *OF_A_JOB),
    *_links("get_job", 200, {"id": SAME_ID}, *OF_A_JOB[1:]),
    *_links("get_job", 200, {"id": "$response.body#/variants/0/result_id"}, *OF_A_RESULT),
    *_links("cancel_job", 200, {"id": ID}, "get_job", "get_job_results"),
    *_links("get_job_results", 200, {"id": "$response.body#/results/0/id"}, *OF_A_RESULT),
    Link(
        "get_job_results",
        200,
        "compare_results",
        {"baseline": "$response.body#/results/0/id", "candidate": "$response.body#/results/1/id"},
    ),
    *_links("get_result", 200, {"id": SAME_ID}, *OF_A_RESULT[1:]),
    *_links("get_result", 200, {"id": "$response.body#/job_id"}, "get_job", "get_job_results"),
    Link(
        "list_artifacts",
        200,
        "get_artifact",
        {"id": SAME_ID, "name": "$response.body#/artifacts/0/name"},
    ),
    *_links("get_leaderboard", 200, {"id": "$response.body#/boards/0/rows/0/result_id"}, *OF_A_RESULT),
    *_links("get_leaderboard", 200, {"id": "$response.body#/boards/0/rows/0/job_id"}, "get_job"),
    Link(
        "get_leaderboard",
        200,
        "compare_results",
        {
            "baseline": "$response.body#/boards/0/rows/0/result_id",
            "candidate": "$response.body#/boards/0/rows/1/result_id",
        },
    ),
    *_links("list_devices", 200, {"id": "$response.body#/devices/0/id"}, "get_device", "list_device_reports"),
    *_links("get_device", 200, {"id": SAME_ID}, "list_device_reports"),
)


def links_of(operation: str, status: str) -> dict[str, object]:
    """The links from one answer of a call, by the call that they lead to."""
    return {
        link.target: link.document()
        for link in LINKS
        if (link.source, str(link.status)) == (operation, status)
    }
