"""JSON schemas of jobs, techniques and workloads, from the models that validate them."""

from typing import Any

from fastapi import APIRouter

from api.auth import Reader
from api.openapi import GUARDED
from optigpu.backends import BACKENDS
from optigpu.job.spec import JobSpec
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Frozen
from optigpu.workloads import WORKLOADS

router = APIRouter(prefix="/v1/schema", tags=["schema"], responses=GUARDED)


class Techniques(Frozen):
    """Every technique: its name, layer, summary, what it requires and excludes, its JSON schema."""

    techniques: tuple[dict[str, Any], ...]


class Workloads(Frozen):
    """Every workload: its kind, summary, metrics, its JSON schema."""

    workloads: tuple[dict[str, Any], ...]


@router.get("/job", operation_id="get_job_schema", summary="The JSON schema of a job")
def get_job_schema(_: Reader) -> dict[str, Any]:
    """The schema of the body of `POST /v1/jobs`."""
    return JobSpec.model_json_schema()


@router.get("/techniques", operation_id="list_techniques", summary="List techniques")
def list_techniques(_: Reader) -> Techniques:
    """The techniques that a stack can be made of."""
    from optigpu.report.catalog import technique_fact

    return Techniques(
        techniques=tuple(
            technique_fact(kind) | {"schema": kind.model_json_schema()} for kind in TECHNIQUES.values()
        )
    )


@router.get("/workloads", operation_id="list_workloads", summary="List workloads")
def list_workloads(_: Reader) -> Workloads:
    """The workloads that can be measured."""
    return Workloads(
        workloads=tuple(
            {
                "kind": name,
                "summary": kind.summary,
                "primary": kind.primary,
                "metrics": [*kind.metrics, *kind.for_some, *kind.of_queries, *kind.of_loads],
                "needs_model": kind.task.needs_model,
                "backends": [
                    backend.name
                    for backend in BACKENDS.values()
                    if not backend.supports(kind(kind=name), None)
                ],
                "schema": kind.model_json_schema(),
            }
            for name, kind in WORKLOADS.items()
        )
    )
