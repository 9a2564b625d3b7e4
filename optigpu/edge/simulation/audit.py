"""Each device's account against what the service has."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from optigpu.edge.simulation.documents import DeviceAccount, FleetResult, RequestTimes, StoredReport
from optigpu.vocabulary import Document

Identity = tuple[str, str, int]


def audit(
    accounts: Sequence[DeviceAccount],
    stored: Mapping[str, Sequence[StoredReport]],
    devices: int,
    seconds: float,
) -> FleetResult:
    """What became of every report. `stored` are the service's reports by device, `devices` how many were wanted."""
    made = {
        (account.device_id or "", report.boot_id, report.sequence): report
        for account in accounts
        for report in account.reports
    }
    held = Counter(
        (device_id, report.boot_id, report.sequence)
        for device_id, reports in stored.items()
        for report in reports
    )
    digests = {
        (device_id, report.boot_id, report.sequence): report.digest
        for device_id, reports in stored.items()
        for report in reports
    }
    missing = {identity: report for identity, report in made.items() if identity not in held}
    gone = [report for report in missing.values() if not report.waits]
    every = [report for reports in stored.values() for report in reports]
    return FleetResult(
        devices=devices,
        enrolled=sum(account.device_id is not None for account in accounts),
        seconds=seconds,
        made=len(made),
        acknowledged=sum(report.acknowledged for report in made.values()),
        stored=len(held),
        waiting=sum(report.waits for report in missing.values()),
        cut=sum(report.fate == "cut" for report in gone),
        dropped=sum(report.fate == "dropped" for report in gone),
        lost=sum(report.fate == "kept" for report in gone),
        unstored=sum(report.acknowledged for report in missing.values()),
        duplicated=sum(count - 1 for count in held.values()),
        altered=sum(
            report.digest is not None and digests.get(identity, report.digest) != report.digest
            for identity, report in made.items()
        ),
        foreign=len(held.keys() - made.keys()),
        conflicts=sum(account.conflicts for account in accounts),
        ranked=sum(report.ranked or report.source != "simulator" for report in every),
        boots=sum(account.boots for account in accounts),
        faults=_added([account.faults for account in accounts]),
        statuses=_added([account.statuses for account in accounts]),
        quarantined=_added([account.quarantined for account in accounts]),
        requests=_times([us for account in accounts for us in account.latencies_us]),
    )


def stored_report(document: Document, source: str, ranked: bool) -> StoredReport:
    """A report of the service, `document` as the device sent it."""
    return StoredReport(
        boot_id=document["boot_id"],
        sequence=document["sequence"],
        digest=digest_of(document),
        source=source,
        ranked=ranked,
    )


def digest_of(document: Document) -> str:
    """Of a report, however its JSON is written; the simulator takes the same."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _added(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


def _times(latencies_us: Sequence[int]) -> RequestTimes:
    ordered = sorted(latencies_us)
    if not ordered:
        return RequestTimes(count=0, p50_ms=None, p99_ms=None, max_ms=None)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1000

    return RequestTimes(count=len(ordered), p50_ms=at(0.5), p99_ms=at(0.99), max_ms=ordered[-1] / 1000)
