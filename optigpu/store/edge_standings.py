"""Which report of a device stands on the edge leaderboard: the best supported of its latest setup.

A place is a device in a partition: one model's file, one source of inputs, one runner. It keeps two reports: the one
that ranks, and the newest that does not. Of reports with one setup (firmware, runner's version, clock) one without
flags stands before one with, then one with energy, then the one with more windows, then the newer; a report with
another setup replaces them. So neither a careless rerun nor the fastest of many runs takes the place.
"""

from sqlalchemy.orm import Session

from optigpu.store.tables import DeviceReportRow, EdgeStanding
from optigpu.vocabulary import Document


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
