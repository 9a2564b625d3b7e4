"""Liveness, readiness and Prometheus metrics."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import structlog
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from api.auth import Reader
from api.openapi import GUARDED, problems
from api.problems import ProblemError
from api.service import Service, ServiceDep
from optigpu.documents.fields import Entry
from optigpu.paths import data_dir
from optigpu.vocabulary import Frozen, UnsupportedError

router = APIRouter(tags=["health"])
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
logger = structlog.stdlib.get_logger("api.health")


class Alive(Frozen):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Readiness(Frozen):
    """The process can serve."""

    status: Literal["ready"] = "ready"


@router.get("/healthz", operation_id="is_alive", summary="Is the process alive?", responses=problems(422))
async def is_alive() -> Alive:
    """Answers while the process runs, whatever the state of the database and the broker."""
    return Alive()


@router.get("/readyz", operation_id="is_ready", summary="Can the service serve?", responses=problems(422))
def is_ready(service: ServiceDep) -> Readiness:
    """Checks the database, its tables, the broker, and the folder and the disk of the data."""
    failures = _failures(service)
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


_SENTENCES = {
    "database": "The database does not answer.",
    "schema": "The database's tables cannot be looked at.",
    "broker": "The broker does not answer; jobs are stored, and start when a worker next looks at the queue.",
    "folder": "The data folder cannot be written.",
    "disk": "The disk of the data folder cannot be looked at.",
}
"""What is said of a part whose check raises an error: the error itself may name an address."""


def _failures(service: Service) -> Mapping[str, str]:
    """Why each part is not ready. What a part rests on comes first: of a database that does not answer nobody knows the
    tables, and of a folder that is not there nobody knows the disk."""
    found = {
        "database": _failure("database", service.database.ping),
        "broker": _failure("broker", service.doorbell.ping),
    }
    if not found["database"]:
        found["schema"] = _failure("schema", partial(_lacking_tables, service.settings.database_url))
    folder = service.database.folder
    if folder:
        found["folder"] = _failure("folder", partial(_write, folder))
    at = folder or _data_folder()
    if at and at.is_dir() and not found.get("folder"):
        found["disk"] = _failure("disk", partial(_lacking_space, at, service.settings.min_free_bytes))
    return {part: why for part in _SENTENCES if (why := found.get(part))}


def _data_folder() -> Path | None:
    """None where there is none: with a server for a database nothing need be kept here."""
    try:
        return data_dir()
    except UnsupportedError:
        return None


def _failure(part: str, check: Callable[[], str | None]) -> str | None:
    try:
        why = check()
    except Exception as error:
        logger.warning("not_ready", part=part, reason=str(error))
        return _SENTENCES[part]
    if why:
        logger.warning("not_ready", part=part, reason=why)
    return why


def _lacking_tables(url: str) -> str | None:
    import migrations

    return migrations.lacking(url)


def _write(folder: Path) -> None:
    """Writes a file that has no name and is gone at once."""
    with TemporaryFile(dir=folder):
        pass


def _lacking_space(folder: Path, least: int) -> str | None:
    free = shutil.disk_usage(folder).free
    if free >= least:
        return None
    return (
        f"The disk of the data folder has {free} bytes free, fewer than the {least} of OPTIGPU_MIN_FREE_BYTES; free "
        "some space."
    )
