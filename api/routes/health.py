"""Liveness, readiness and Prometheus metrics."""

from collections.abc import Callable
from typing import Literal

import structlog
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from api.auth import Reader
from api.fields import Entry
from api.openapi import GUARDED, problems
from api.problems import ProblemError
from api.service import Service, ServiceDep
from optigpu.vocabulary import Frozen, StoreError

router = APIRouter(tags=["health"])
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
logger = structlog.stdlib.get_logger("api.health")


class Alive(Frozen):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Readiness(Frozen):
    """The process can serve."""

    status: Literal["ready"] = "ready"


@router.get("/healthz", operation_id="is_alive", summary="Is the process alive?", responses=problems())
async def is_alive() -> Alive:
    """Answers while the process runs, whatever the state of the database and the broker."""
    return Alive()


@router.get("/readyz", operation_id="is_ready", summary="Can the service serve?", responses=problems())
def is_ready(service: ServiceDep) -> Readiness:
    """Checks the database, the version of its tables, and the broker."""
    checks = {
        "database": service.database.ping,
        "schema": _schema_check(service),
        "broker": service.doorbell.ping,
    }
    failures = {part: why for part, check in checks.items() if (why := _failure(part, check))}
    if failures:
        entries: list[Entry] = [{"field": part, "message": why} for part, why in failures.items()]
        raise ProblemError(503, f"Not ready: {', '.join(failures)}.", entries)
    return Readiness()


@router.get(
    "/metrics",
    operation_id="get_metrics",
    summary="Prometheus figures",
    response_class=PlainTextResponse,
    responses=GUARDED,
)
def get_metrics(service: ServiceDep, _: Reader) -> PlainTextResponse:
    """Request counts and times, jobs by state, the length of the queue, workers."""
    return PlainTextResponse(service.metrics.text(), media_type=EXPOSITION)


def _schema_check(service: Service) -> Callable[[], None]:
    def check() -> None:
        import migrations

        if not migrations.is_current(service.settings.database_url):
            raise StoreError("The database has another revision.")

    return check


_SENTENCES = {
    "database": "The database does not answer.",
    "schema": "The database's tables are not those of this version; run `alembic upgrade head`.",
    "broker": "The broker does not answer; jobs are stored, and start when a worker next looks at the queue.",
}


def _failure(part: str, check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        logger.warning("not_ready", part=part, reason=str(error))
        return _SENTENCES[part]
    return ""
