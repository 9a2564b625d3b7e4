"""The OpenAPI document: FastAPI's own, with the bodies that calls read by themselves and problems for all errors.

Its links say which field of an answer is which parameter of another call: a client that follows them comes from a
posted job to its results, and from a row of the leaderboard to raw samples. A test posts or reads each of its examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api.device_messages import ClaimRequest, DeviceMessage, KeyRequest, RunRequest
from api.problems import MEDIA_TYPE
from optigpu import __version__
from optigpu import __version__ as VERSION
from optigpu.documents.administration import AlertRequest, WebhookRequest
from optigpu.documents.events import PilotBeat, PilotEnd, PilotEvent, PilotOutcome
from optigpu.documents.gates import GateRequest
from optigpu.documents.manifest import ModelManifest
from optigpu.documents.others import OthersFile
from optigpu.documents.views import EventView, Problem
from optigpu.job.spec import JobSpec
from optigpu.store.workers import WorkerInfo


@dataclass(frozen=True)
class Example:
    """A document with a title."""

    summary: str
    document: dict[str, object]


JOBS = {
    "ladder": Example(
        "What does each layer buy for GPT-2 on the CPU, alone and stacked?",
        {
            "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64, "batch_size": 1},
            "model": "preset:gpt2",
            "device": "cpu",
            "plan": "ladder",
            "stack": [{"name": "bf16"}, {"name": "int8_weight_only"}, {"name": "torch_compile"}],
            "measure": {"replicates": 1, "min_seconds": 2, "max_seconds": 20},
        },
    ),
    "single": Example(
        "One variant on a GPU with at least 8 GB",
        {
            "workload": {"kind": "generate", "prompt_tokens": 128, "new_tokens": 128, "batch_size": 1},
            "model": "preset:llama-3.2-1b",
            "device": "cuda",
            "stack": [{"name": "bf16"}, {"name": "static_kv_cache"}],
            "target": {"min_vram_bytes": 8000000000},
        },
    ),
    "matmul": Example(
        "How fast are matrix products here?",
        {
            "workload": {"kind": "matmul", "sizes": [512, 1024], "dtypes": ["float32", "bfloat16"]},
            "device": "cpu",
        },
    ),
}

_MODEL = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_FIRMWARE = "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"
_GOLDEN = "fd61a03af4f77d870fc21e05e7e80678095c92d808cfb3b5c279ee04c74aca13"
_NONCE = "a4e624d686e03ed2767c0abd85c14426"
_SEALED = "b0804ec967f48520697662a204f5fe72b0804ec967f48520697662a204f5fe72"

CLAIMS = {
    "claim": Example(
        "A board with an invitation that begins with ABCD",
        {
            "schema": 1,
            "invite": "ABCD",
            "nonce": _NONCE,
            "sealed_key": _SEALED,
            "proof": _GOLDEN,
            "board": "esp32s3-n16r8",
            "firmware": _FIRMWARE,
            "name": None,
        },
    ),
}
RUNS = {"run": Example("Before the warm-up", {"schema": 1, "model_sha256": _MODEL})}
KEYS = {"key": Example("A new key", {"schema": 1, "nonce": _NONCE, "sealed_key": _SEALED})}

_STATUS = {
    "board": "esp32s3-n16r8",
    "reset_reason": "power_on",
    "rssi": -61,
    "heap_free": 7_900_000,
    "queue_depth": 1,
    "dropped": 0,
    "agent_version": "0.1.0",
    "uptime_us": 93_000_000,
}
_REPORT = {
    "schema": 1,
    "boot_id": "00c0ffee00c0ffee",
    "sequence": 1,
    "run_id": "0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11",
    "model_sha256": _MODEL,
    "input_bytes": 27_648,
    "input_source": "fixed",
    "runner": {"name": "tflm-native", "version": "1.3.2"},
    "board": "esp32s3-n16r8",
    "clock_hz": 240_000_000,
    "firmware_sha256": _FIRMWARE,
    "warmup": 10,
    "windows": [{"count": 128, "total_us": 10_048_000, "energy_uj": 5_124_000}] * 5,
    "latency_us": {"count": 640, "min": 78_310, "p50": 78_480, "p90": 78_900, "p99": None},
    "power": {"source": "ina226", "idle_uw": 212_000},
    "golden": {"count": 8, "digest": _GOLDEN},
    "arena_bytes": 412_000,
    "heap_free": 7_900_000,
    "started_us": 1_790_000_000_000_000,
    "ticks_us": 53_000_000,
    "error": None,
}
MESSAGES = {
    "heartbeat": Example("No report: the device is there", {"schema": 1, "device": _STATUS, "reports": []}),
    "report": Example(
        "One report, 1.2 s after its run",
        {"schema": 1, "device": _STATUS, "reports": [{"waited_us": 1_200_000, "report": _REPORT}]},
    ),
}
MANIFESTS = {
    "mobilenet": Example(
        "MobileNetV2 with one golden input and two classes",
        {
            "schema": 1,
            "sha256": _MODEL,
            "network": {"family": "mobilenet_v2", "alpha": "0.35", "input": [96, 96, 3], "classes": 2},
            "model_bytes": 580_000,
            "operators": [
                {"name": "CONV_2D", "count": 35, "macs": 9_800_000},
                {"name": "DEPTHWISE_CONV_2D", "count": 17, "macs": 1_200_000},
            ],
            "macs": 11_000_000,
            "parameter_bytes": 400_000,
            "arena_bytes": 412_000,
            "input": {"shape": [1, 96, 96, 3], "dtype": "int8", "scale": 0.0078125, "zero_point": -1},
            "output": {"shape": [1, 2], "dtype": "int8", "scale": 0.00390625, "zero_point": -128},
            "agreement": {"samples": 200, "top1": 0.985, "kld_mean": 0.004},
            "calibration": {"kind": "images", "samples": 200},
            "rankable": True,
            "golden": {"count": 1, "inputs_sha256": _GOLDEN, "outputs": ["7f80"]},
            "tools": {"tensorflow": "2.21.0", "tflite-micro": "0.1.dev20260310"},
        },
    ),
}
OTHERS = {
    "vllm": Example(
        "A run of vllm bench serve, whose file does not tell its version",
        {
            "tool": "vllm bench serve",
            "model": "SmolLM2-135M",
            "rows": [
                {
                    "label": "inf requests/s, 1 at once, 20 answered, 0 failed",
                    "figures": [
                        {
                            "metric": "tpot_s",
                            "statistic": "median",
                            "value": 0.0114,
                            "named": "median_tpot_ms",
                        }
                    ],
                }
            ],
            "left_out": [{"named": "mean_itl_ms", "why": "between chunks of the stream"}],
        },
    ),
}
ALERTS = {
    "threshold": Example(
        "When a variant's tokens per second fall below 100",
        {
            "result_id": "0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11",
            "kind": "threshold",
            "metric": "tokens_per_s",
            "threshold": 100.0,
        },
    ),
    "change": Example(
        "When its level changes, in either direction",
        {"result_id": "0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11", "kind": "change_point"},
    ),
}
GATES = {
    "worse": Example(
        "A head that is 6% slower",
        {
            "series": "bench.py, tokens/s",
            "outcome": {
                "verdict": "worse",
                "exit_status": 1,
                "metric": "tokens/s",
                "better": "higher",
                "worse_than": 0.03,
                "ratio": 0.94,
                "ratio_ci": [0.93, 0.95],
                "loss": 0.06,
                "loss_ci": [0.05, 0.07],
                "smallest_loss_found": 0.04,
                "chance": 0.001,
                "base": "main 4f1c2d3",
                "head": "HEAD 8ab0c1e",
                "base_figures": [100.0, 101.0],
                "head_figures": [94.0, 95.0],
                "seconds": 40.0,
                "minutes": 5.0,
            },
        },
    ),
}
WEBHOOKS = {
    "chat": Example(
        "Every job that ends, and every regression",
        {"url": "https://hooks.example.org/optigpu", "events": ["job.finished", "regression.found"]},
    ),
}
PILOTS = {
    "claim": Example(
        "A machine with two cores",
        {
            "id": "0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11",
            "host_id": "4f1c2b7d90aa31e5",
            "hardware_class": "AMD EPYC 9654 2 cores",
            "device": "cpu",
            "memory_bytes": 8000000000,
            "backends": ["torch"],
            "version": VERSION,
        },
    ),
    "beat": Example(
        "Half of the job is done",
        {"fencing": 1, "progress": {"fraction": 0.5, "doing": "replicate 2 of 3", "remaining_s": 61.0}},
    ),
    "event": Example("A variant starts", {"fencing": 1, "event": {"kind": "variant_started", "index": 0}}),
    "outcome": Example(
        "A variant that failed",
        {
            "fencing": 1,
            "outcome": {"index": 0, "status": "failed", "reason": "There was no memory left."},
            "files": [],
        },
    ),
    "end": Example(
        "The job has ended",
        {"fencing": 1, "end": {"kind": "finish", "state": "succeeded", "reason": None, "attribution": None}},
    ),
}


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
    *(
        ClaimRequest,
        RunRequest,
        DeviceMessage,
        KeyRequest,
        ModelManifest,
        OthersFile,
        WebhookRequest,
        AlertRequest,
        GateRequest,
    ),
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
    *_links("import_others", 201, {"id": ID}, "remove_others"),
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
