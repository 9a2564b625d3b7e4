"""Runs that devices began, and their reports: each stored once, with what was made of it. Whoever writes here has
locked the device (`devices.enter`). A place on the edge leaderboard is a device with one model's file, source of inputs
and runner. It keeps two reports: the one that ranks, the best supported of the latest setup, and the newest that does
not."""

from datetime import datetime

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from optigpu.documents.devices import (
    DeviceReport,
    DeviceReportPage,
    DeviceReportView,
    DeviceSource,
    Flag,
    Reason,
    ReportAnswer,
    ReportState,
)
from optigpu.job.spec import digest
from optigpu.store.database import moment
from optigpu.store.devices import DeviceRequest
from optigpu.store.statements import newest_first
from optigpu.store.tables import DeviceReportRow, DeviceRun, EdgeStanding
from optigpu.vocabulary import ConflictError, Document, Frozen, new_id


class StartedRun(Frozen):
    """A run whose start the server saw. `reported` says that a report about it is stored."""

    id: str
    started_at: datetime
    boot_id: str
    model_sha256: str
    reported: bool = False


class JudgedReport(Frozen):
    """A report with what was made of it."""

    report: DeviceReport
    source: DeviceSource
    state: ReportState
    ranked: bool
    reasons: tuple[Reason, ...]
    flags: tuple[Flag, ...]


def start_run(session: Session, request: DeviceRequest, model_sha256: str) -> StartedRun:
    """Enters the start of a run, once for a repeated request. Raises ConflictError if that began another model's."""
    query = select(DeviceRun).where(
        DeviceRun.device_id == request.device_id,
        DeviceRun.boot_id == request.boot_id,
        DeviceRun.sequence == request.sequence,
    )
    row = session.scalars(query).one_or_none()
    if row is None:
        row = DeviceRun(
            id=new_id(),
            device_id=request.device_id,
            boot_id=request.boot_id,
            sequence=request.sequence,
            model_sha256=model_sha256,
            started_at=moment(session),
        )
        session.add(row)
        session.flush()
    elif row.model_sha256 != model_sha256:
        raise ConflictError("A request with this boot and sequence began a run of another model.")
    return row.as_view(StartedRun)


def run_of(session: Session, device_id: str, run_id: str) -> StartedRun | None:
    """A run of this device; None if it began no such run."""
    row = session.get(DeviceRun, run_id)
    if row is None or row.device_id != device_id:
        return None
    reported = session.scalar(select(exists().where(DeviceReportRow.run_id == run_id)))
    return row.as_view(StartedRun, reported=bool(reported))


def answered(session: Session, device_id: str, report: DeviceReport) -> ReportAnswer | None:
    """The answer to a report whose identity is known: the first answer, or a conflict; None for a new report."""
    query = select(DeviceReportRow).where(
        DeviceReportRow.device_id == device_id,
        DeviceReportRow.boot_id == report.boot_id,
        DeviceReportRow.sequence == report.sequence,
    )
    row = session.scalars(query).one_or_none()
    if row is None:
        return None
    if row.body_digest != _digest(report):
        identity, state = {"boot_id": report.boot_id, "sequence": report.sequence}, ReportState.CONFLICT
        return ReportAnswer.model_validate({**identity, "report_id": None, "state": state, "ranked": False})
    return _answer(row).model_copy(update={"duplicate": True})


def add(session: Session, request: DeviceRequest, judged: JudgedReport) -> ReportAnswer:
    """Stores a new report and returns its answer."""
    report = judged.report
    same = ("boot_id", "sequence", "run_id", "model_sha256", "input_source", "board")
    row = DeviceReportRow(
        **{name: getattr(report, name) for name in (*same, "count", "energy_per_inference_uj")},
        **judged.model_dump(include={"source", "state", "ranked"}),
        id=new_id(),
        device_id=request.device_id,
        received_at=request.received_at,
        runner=report.runner.name,
        reasons=[reason.value for reason in judged.reasons],
        flags=[flag.value for flag in judged.flags],
        latency_p50_us=report.latency_us.p50,
        power_source=report.power.source,
        body_digest=_digest(report),
        document=report.model_dump(mode="json"),
    )
    session.add(row)
    session.flush()
    _enter(session, row)
    return _answer(row)


def list_(
    session: Session, device_id: str, *, limit: int = 50, cursor: str | None = None
) -> DeviceReportPage:
    """A page of a device's reports, newest first. Raises CursorError."""
    query = select(DeviceReportRow).where(DeviceReportRow.device_id == device_id)
    rows, following = newest_first(session, query, DeviceReportRow.id, limit, cursor)
    return DeviceReportPage(
        reports=tuple(row.as_view(DeviceReportView) for row in rows), next_cursor=following
    )


def _digest(report: DeviceReport) -> str:
    return digest(report.model_dump(mode="json"))


def _answer(row: DeviceReportRow) -> ReportAnswer:
    """With the reasons and flags that this version knows."""
    reasons = [name for name in row.reasons if name in set(Reason)]
    return row.as_view(
        ReportAnswer,
        report_id=row.id,
        reasons=reasons,
        flags=[name for name in row.flags if name in set(Flag)],
    )


def _enter(session: Session, report: DeviceReportRow) -> None:
    """Enters a report that was just stored on the edge leaderboard."""
    place = {
        "model_sha256": report.model_sha256,
        "input_source": report.input_source,
        "runner": report.runner,
        "device_id": report.device_id,
        "ranked": report.ranked,
    }
    standing = session.get(EdgeStanding, place)
    if standing is None:
        session.add(EdgeStanding(**place, report_id=report.id))
    else:
        current = session.get_one(DeviceReportRow, standing.report_id)
        is_new = _setup(report.document) != _setup(current.document)
        if not report.ranked or is_new or _support(report) >= _support(current):
            standing.report_id = report.id
    session.flush()


def _setup(report: Document) -> tuple[object, ...]:
    return report["firmware_sha256"], report["runner"]["version"], report["clock_hz"]


def _support(report: DeviceReportRow) -> tuple[bool, bool, int]:
    """Windows and not inferences are counted: of windows of equal length the fastest has the most inferences."""
    return not report.flags, report.energy_per_inference_uj is not None, len(report.document["windows"])
