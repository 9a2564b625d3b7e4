"""A device's message: how it is, and its reports, each judged once and stored."""

from datetime import datetime

from api.device_messages import DeviceMessage, MessageAnswer, SentReport
from api.plausibility import Evidence, judge
from optigpu.documents.devices import ReportAnswer
from optigpu.hardware.boards import board
from optigpu.store import devices, edge_reports
from optigpu.store.database import Session
from optigpu.store.devices import DeviceRequest, Entered
from optigpu.store.edge_reports import JudgedReport


def take(session: Session, request: DeviceRequest, device: Entered, message: DeviceMessage) -> MessageAnswer:
    """Stores what is new in the message; the device is locked.

    A copy of an earlier message changes nothing of the device's record and gets the first answers again.
    """
    if device.newest:
        devices.note_status(session, request.device_id, message.device)
    answers = tuple(_answer(session, request, device, sent) for sent in message.reports)
    return MessageAnswer(
        server_time_us=microseconds(request.received_at), rotate=device.rotate, reports=answers
    )


def microseconds(at: datetime) -> int:
    """Unix time."""
    return int(at.timestamp() * 1e6)


def _answer(session: Session, request: DeviceRequest, device: Entered, sent: SentReport) -> ReportAnswer:
    report = sent.report
    known = edge_reports.answered(session, request.device_id, report)
    if known is not None:
        return known
    judgement = judge(report, _evidence(session, request, device, sent))
    judged = JudgedReport(
        report=report,
        source=device.source,
        state=judgement.state,
        ranked=judgement.ranked,
        reasons=judgement.reasons,
        flags=judgement.flags,
    )
    return edge_reports.add_report(session, request, judged)


def _evidence(session: Session, request: DeviceRequest, device: Entered, sent: SentReport) -> Evidence:
    report = sent.report
    return Evidence(
        received_at=request.received_at,
        source=device.source,
        device_board=device.board,
        clock_synchronised=request.clock_synchronised,
        waited_us=sent.waited_us,
        run=edge_reports.run_of(session, request.device_id, report.run_id) if report.run_id else None,
        manifest=edge_reports.manifest_of(session, report.model_sha256),
        board=board(report.board),
    )
