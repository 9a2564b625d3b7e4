"""Runs that devices began, and their reports: each stored once, with what was made of it. Whoever writes here has
locked the device (`devices.enter`). A place on the edge leaderboard is a device with one model's file, source of inputs
and runner. It keeps two reports: the one that ranks, the best supported of the latest setup, and the newest that does
not."""

from collections.abc import Sequence
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
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.database import moment
from optigpu.store.devices import DeviceRequest
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
    """Enters the start of a run, once for a repeated request. Raises ConflictError if it began a run of another
    model."""
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
    return StartedRun(
        id=row.id, started_at=row.started_at, boot_id=row.boot_id, model_sha256=row.model_sha256
    )


def run_of(session: Session, device_id: str, run_id: str) -> StartedRun | None:
    """A run of this device; None if it began no such run."""
    row = session.scalars(
        select(DeviceRun).where(DeviceRun.id == run_id, DeviceRun.device_id == device_id)
    ).one_or_none()
    if row is None:
        return None
    reported = session.scalar(select(exists().where(DeviceReportRow.run_id == run_id)))
    return StartedRun(
        id=row.id,
        started_at=row.started_at,
        boot_id=row.boot_id,
        model_sha256=row.model_sha256,
        reported=bool(reported),
    )


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
        return ReportAnswer(
            boot_id=report.boot_id,
            sequence=report.sequence,
            report_id=None,
            state=ReportState.CONFLICT,
            ranked=False,
        )
    return _answer(row).model_copy(update={"duplicate": True})


def add(session: Session, request: DeviceRequest, judged: JudgedReport) -> ReportAnswer:
    """Stores a new report and returns its answer."""
    report = judged.report
    row = DeviceReportRow(
        id=new_id(),
        device_id=request.device_id,
        boot_id=report.boot_id,
        sequence=report.sequence,
        run_id=report.run_id,
        received_at=request.received_at,
        model_sha256=report.model_sha256,
        input_source=report.input_source,
        runner=report.runner.name,
        board=report.board,
        source=judged.source,
        state=judged.state,
        ranked=judged.ranked,
        reasons=[reason.value for reason in judged.reasons],
        flags=[flag.value for flag in judged.flags],
        latency_p50_us=report.latency_us.p50,
        count=report.count,
        energy_per_inference_uj=report.energy_per_inference_uj,
        power_source=report.power.source,
        body_digest=_digest(report),
        document=report.model_dump(mode="json"),
    )
    session.add(row)
    session.flush()
    enter(session, row)
    return _answer(row)


def list_(
    session: Session, device_id: str, *, limit: int = 50, cursor: str | None = None
) -> DeviceReportPage:
    """A page of a device's reports, newest first. Raises CursorError."""
    query = select(DeviceReportRow).where(DeviceReportRow.device_id == device_id)
    if cursor is not None:
        query = query.where(DeviceReportRow.id < decode_cursor(cursor, str)[0])
    rows = session.scalars(query.order_by(DeviceReportRow.id.desc()).limit(limit + 1)).all()
    return DeviceReportPage(
        reports=tuple(_view(row) for row in rows[:limit]),
        next_cursor=encode_cursor(rows[limit - 1].id) if len(rows) > limit else None,
    )


def _digest(report: DeviceReport) -> str:
    return digest(report.model_dump(mode="json"))


def _reasons(names: Sequence[str]) -> tuple[Reason, ...]:
    """Those that this version knows."""
    return tuple(Reason(name) for name in names if name in set(Reason))


def _answer(row: DeviceReportRow) -> ReportAnswer:
    return ReportAnswer(
        boot_id=row.boot_id,
        sequence=row.sequence,
        report_id=row.id,
        state=row.state,
        ranked=row.ranked,
        reasons=_reasons(row.reasons),
        flags=tuple(Flag(name) for name in row.flags if name in set(Flag)),
    )


def _view(row: DeviceReportRow) -> DeviceReportView:
    return DeviceReportView(
        id=row.id,
        device_id=row.device_id,
        received_at=row.received_at,
        source=row.source,
        state=row.state,
        ranked=row.ranked,
        reasons=tuple(row.reasons),
        flags=tuple(row.flags),
        latency_p50_us=row.latency_p50_us,
        count=row.count,
        energy_per_inference_uj=row.energy_per_inference_uj,
        document=row.document,
    )


def enter(session: Session, report: DeviceReportRow) -> None:
    """Enters a report that was just stored. The device's row must be locked, so that its reports follow each other."""
    place = {
        "model_sha256": report.model_sha256,
        "input_source": report.input_source,
        "runner": report.runner,
        "device_id": report.device_id,
        "ranked": report.ranked,
    }
    session.flush()  # the standing refers to the report
    standing = session.get(EdgeStanding, place)
    if standing is None:
        session.add(EdgeStanding(**place, report_id=report.id))
    elif not report.ranked or _takes_the_place(report, session.get_one(DeviceReportRow, standing.report_id)):
        standing.report_id = report.id
    session.flush()


def _takes_the_place(report: DeviceReportRow, current: DeviceReportRow) -> bool:
    if _setup(report.document) != _setup(current.document):
        return True
    return _support(report) >= _support(current)


def _setup(report: Document) -> tuple[object, ...]:
    return report["firmware_sha256"], report["runner"]["version"], report["clock_hz"]


def _support(report: DeviceReportRow) -> tuple[bool, bool, int]:
    """Windows and not inferences are counted: of windows of equal length the fastest has the most inferences."""
    return not report.flags, report.energy_per_inference_uj is not None, len(report.document["windows"])
