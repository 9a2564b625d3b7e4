"""What devices send, whether it can be true, and what they are answered. The reports, which are stored, are in
`documents/devices.py`.

A signature says who reports, not that it is true. What can be held against a report: what the server saw itself (when
the run began, when the report came), what the chip can do at most, the model's golden outputs, and the report's own
figures, which must agree with each other. Each report is judged once, and with that it is decided whether it ranks.
"""

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Annotated

from pydantic import Field, StringConstraints

from optigpu.documents.devices import (
    Amount,
    BoardName,
    DeviceReport,
    DeviceSource,
    DeviceStatus,
    Flag,
    Hex64,
    Name,
    Reason,
    ReportAnswer,
    ReportState,
    RunnerName,
    Sent,
)
from optigpu.documents.manifest import ModelManifest
from optigpu.edge.fit import predict
from optigpu.hardware.catalog import Board, board
from optigpu.store import devices, edge_reports
from optigpu.store.database import Session
from optigpu.store.devices import DeviceRequest, Entered
from optigpu.store.edge_reports import JudgedReport, StartedRun
from optigpu.vocabulary import Frozen

MOST_REPORTS = 32
"""In one message."""
Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class SentReport(Frozen):
    """A report in a message. `waited_us` is the device's time from the run's end to the message; null after a
    reboot."""

    waited_us: Amount | None
    report: DeviceReport


class DeviceMessage(Sent):
    """What a device sends: how it is, and reports from its queue. No report at all is a heartbeat."""

    device: DeviceStatus
    reports: Annotated[tuple[SentReport, ...], Field(max_length=MOST_REPORTS)]


class MessageAnswer(Frozen):
    """The answer to a message, report by report in its order. `rotate` asks the device to make a new key."""

    server_time_us: int
    rotate: bool
    reports: tuple[ReportAnswer, ...]


class ClaimRequest(Sent):
    """A device asks to be enrolled: `invite` is the first group of its code; the others seal its key and sign this."""

    invite: Annotated[str, StringConstraints(pattern=r"^[0-9A-HJKMNP-TV-Z]{4}$")]
    nonce: Hex32
    sealed_key: Hex64
    proof: Hex64
    board: BoardName
    firmware: Hex64
    name: Name | None = None


class ClaimAnswer(Frozen):
    """The identity of a new device; it signs with `key_id` from now on."""

    device_id: str
    key_id: str
    server_time_us: int


class RunRequest(Sent):
    """A device is about to measure this model."""

    model_sha256: Hex64


class RunAnswer(Frozen):
    """The server saw the start; the run's report names `run_id`."""

    run_id: str
    server_time_us: int


class KeyRequest(Sent):
    """A new key, sealed with the one that signs this request."""

    nonce: Hex32
    sealed_key: Hex64


class KeyAnswer(Frozen):
    """The new key's id. The old key is valid until the new one is first used."""

    key_id: str


LEAST_WINDOWS, LEAST_WINDOW_US = 5, 10_000_000
SLACK, SLACK_US = 0.02, 500_000
"""A device's clock may differ by the share; the constant is for a request's way."""
LEAST_OBSERVED = 0.9
CLOCK_STARTS = datetime(2020, 1, 1, tzinfo=UTC)
"""A clock that says an earlier time was never set."""
CLOCK_WINDOW_US = 300_000_000
FEWEST = {"p50": 11, "p90": 64, "p99": 662}
"""Requests below which a percentile is null, as in optigpu.statistics.intervals."""
ROUNDING = 1.01
"""A histogram's buckets are up to 1% wide."""
MOST_SKEW = 2
"""By how much the mean of a typical window may exceed the largest percentile up to p90."""
POWER_W = (0.0001, 50.0)
"""Between these is the mean power of a board of this kind."""
FAR_SLOWER = 2.0
"""A device is far slower than published where it takes so many times the upper end of the prediction."""


@dataclass(frozen=True)
class Evidence:
    """What the server knows besides the report. `received_at` and the run's start are by the same clock. `run` is the
    one that the report names, None if this device began no such run. `device_board` is what the device enrolled as,
    `board` the report's board in the catalog."""

    received_at: datetime
    source: DeviceSource
    device_board: str
    clock_synchronised: bool
    waited_us: int | None = None
    run: StartedRun | None = None
    manifest: ModelManifest | None = None
    board: Board | None = None

    @property
    def observed_us(self) -> float | None:
        """From the run's start to the report's arrival; null for an unknown run."""
        return None if self.run is None else (self.received_at - self.run.started_at).total_seconds() * 1e6


@dataclass(frozen=True)
class Judgement:
    """What is made of a report; it ranks if there is no reason why not."""

    reasons: tuple[Reason, ...]
    flags: tuple[Flag, ...]

    @property
    def ranked(self) -> bool:
        return not self.reasons

    @property
    def state(self) -> ReportState:
        """Quarantined if a reason questions its truth."""
        doubted = any(reason.quarantines for reason in self.reasons)
        return ReportState.QUARANTINED if doubted else ReportState.ACCEPTED


def judge(report: DeviceReport, evidence: Evidence) -> Judgement:
    return Judgement(
        reasons=tuple(reason for reason, applies in _REASONS.items() if applies(report, evidence)),
        flags=tuple(flag for flag, applies in _FLAGS.items() if applies(report, evidence)),
    )


def clock_is_set(unix_us: int) -> bool:
    return unix_us >= CLOCK_STARTS.timestamp() * 1e6


def _golden_failed(report: DeviceReport, evidence: Evidence) -> bool:
    manifest, golden = evidence.manifest, report.golden
    if manifest is None or (golden is None and not report.windows):
        return False
    if golden is None or golden.count != manifest.golden.count:
        return True
    return not hmac.compare_digest(golden.digest, manifest.golden.digest(report.run_id))


def _faster_than_roofline(report: DeviceReport, evidence: Evidence) -> bool:
    if evidence.manifest is None or evidence.board is None or report.runner.name.is_host:
        return False
    claimed: list[float] = [us for us in (report.latency_us.min, report.latency_us.p50) if us is not None]
    claimed += [window.total_us / window.count for window in report.windows]
    # A time of n us may be anything below n + 1. The roofline holds whatever runs the model.
    fastest_us = 1e6 * evidence.manifest.macs / evidence.board.peak_macs_per_s
    return any(us + 1 <= fastest_us for us in claimed)


def _longer_than_observed(report: DeviceReport, evidence: Evidence) -> bool:
    observed_us = evidence.observed_us
    if observed_us is None:
        return False
    claimed_us = max(report.total_us, report.ticks_us + (evidence.waited_us or 0))
    return claimed_us > observed_us * (1 + SLACK) + SLACK_US


def _shorter_than_observed(report: DeviceReport, evidence: Evidence) -> bool:
    observed_us = evidence.observed_us
    if observed_us is None or evidence.waited_us is None:
        return False
    return report.ticks_us + evidence.waited_us < observed_us * LEAST_OBSERVED - SLACK_US


def _inconsistent(report: DeviceReport, evidence: Evidence) -> bool:
    board = evidence.board
    if board is not None and not report.runner.name.is_host:
        memory = board.chip.sram_bytes + board.psram_bytes
        if report.clock_hz > board.clock_hz * ROUNDING or max(report.arena_bytes, report.heap_free) > memory:
            return True
    return (
        report.board != evidence.device_board
        or report.total_us > report.ticks_us
        or _percentiles_contradict(report)
        or _energy_is_absurd(report)
        or (evidence.manifest is not None and report.input_bytes != evidence.manifest.input.bytes)
    )


def _percentiles_contradict(report: DeviceReport) -> bool:
    """Percentiles against the windows, against each other, and against the sample counts that they need."""
    latency = report.latency_us
    percentiles = {"p50": latency.p50, "p90": latency.p90, "p99": latency.p99}
    if latency.count != report.count or (latency.min is None) != (latency.count == 0):
        return True
    if any((value is None) != (latency.count < FEWEST[name]) for name, value in percentiles.items()):
        return True
    known = [us for us in (latency.min, *percentiles.values()) if us is not None]
    if any(later * ROUNDING < earlier for earlier, later in pairwise(known)):
        return True
    return bool(report.windows) and _windows_contradict(report)


def _windows_contradict(report: DeviceReport) -> bool:
    """At least the upper half of the times is p50 or more, a tenth p90 or more, and so on; none is below the least."""
    latency, count = report.latency_us, report.count
    means = [window.total_us / window.count for window in report.windows]
    least = latency.min or 0
    most = max((us for us in (latency.p50, latency.p90) if us is not None), default=None)
    if min(means) * ROUNDING < least or (most is not None and median(means) > MOST_SKEW * max(most, 1)):
        return True
    for share, us in ((0.5, latency.p50), (0.1, latency.p90), (0.01, latency.p99)):
        above = max(int(count * share) - 1, 0)
        if us is not None and report.total_us * ROUNDING < above * us + (count - above) * least:
            return True
    return False


def _energy_is_absurd(report: DeviceReport) -> bool:
    energies = [window.energy_uj for window in report.windows]
    if report.power.source == "none":
        return report.power.idle_uw is not None or any(energy is not None for energy in energies)
    least_w, most_w = POWER_W
    return any(
        not least_w <= window.energy_uj / window.total_us <= most_w
        for window in report.windows
        if window.energy_uj is not None
    )


def _run_unknown(report: DeviceReport, evidence: Evidence) -> bool:
    run = evidence.run
    known = run is not None and (run.boot_id, run.model_sha256) == (report.boot_id, report.model_sha256)
    return report.run_id is not None and not known


def _clock_unsynchronised(report: DeviceReport, evidence: Evidence) -> bool:
    """At the message or at the run: either was not set, or the run began in the future."""
    future = report.started_us > evidence.received_at.timestamp() * 1e6 + CLOCK_WINDOW_US
    return not evidence.clock_synchronised or not clock_is_set(report.started_us) or future


def _slower_than_published(report: DeviceReport, evidence: Evidence) -> bool:
    """Far slower than published rates predict for the model; the device is believed, and its build may be wrong."""
    p50, manifest = report.latency_us.p50, evidence.manifest
    if p50 is None or manifest is None or manifest.macs == 0:
        return False
    if evidence.board is None or report.runner.name.is_host:
        return False
    return p50 > FAR_SLOWER * predict(manifest.macs).high_s * 1e6


Check = Callable[[DeviceReport, Evidence], bool]

_REASONS: Mapping[Reason, Check] = {
    Reason.GOLDEN_FAILED: _golden_failed,
    Reason.MODEL_UNKNOWN: lambda _, evidence: evidence.manifest is None,
    Reason.FASTER_THAN_ROOFLINE: _faster_than_roofline,
    Reason.LONGER_THAN_OBSERVED: _longer_than_observed,
    Reason.SHORTER_THAN_OBSERVED: _shorter_than_observed,
    Reason.INCONSISTENT: _inconsistent,
    Reason.RUN_UNKNOWN: _run_unknown,
    Reason.RUN_REUSED: lambda _, evidence: evidence.run is not None and evidence.run.reported,
    Reason.UNWITNESSED: lambda report, _: report.run_id is None,
    Reason.MODEL_NOT_RANKABLE: lambda _, evidence: (
        evidence.manifest is not None and not evidence.manifest.rankable
    ),
    Reason.BOARD_UNKNOWN: lambda report, evidence: evidence.board is None and not report.runner.name.is_host,
    Reason.FEW_WINDOWS: lambda report, _: (
        sum(window.total_us >= LEAST_WINDOW_US for window in report.windows) < LEAST_WINDOWS
    ),
    Reason.SIMULATOR: lambda report, evidence: (
        evidence.source is DeviceSource.SIMULATOR or report.runner.name is RunnerName.SIMULATOR
    ),
    Reason.HOST: lambda report, _: report.runner.name.is_host,
    Reason.ERROR: lambda report, _: report.error is not None,
}
_FLAGS: Mapping[Flag, Check] = {
    Flag.CLOCK_UNSYNCHRONISED: _clock_unsynchronised,
    Flag.SLOWER_THAN_PUBLISHED: _slower_than_published,
}


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
