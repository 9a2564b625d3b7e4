"""What has happened to jobs since the first one, as counts that only grow: attempts, phases, variants and verdicts.
Jobs that are older than the oldest unfinished one can no longer change: a `TallyReader` counts them once."""

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from pydantic import ValidationError
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from optigpu.documents.result import Attribution, Gain
from optigpu.documents.views import WorkerView
from optigpu.store import queue, workers
from optigpu.store.database import moment
from optigpu.store.tables import Attempt, Job, JobEvent, LeaderboardEntry, ResultRow, VariantRow
from optigpu.store.transitions import UNFINISHED
from optigpu.vocabulary import DeviceKind, Frozen, JobState

BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
"""The upper bounds of the buckets of durations; one more bucket holds what took longer."""
COMMITTED_AFTER = timedelta(seconds=60)
"""A job is posted in a transaction that takes far less than this."""
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
ROWS_AT_ONCE = 1000


class Phase(StrEnum):
    """The phases of an attempt: waiting in the queue, until the first variant starts, and from then on."""

    QUEUED = "queued"
    PREPARING = "preparing"
    MEASURING = "measuring"


class PhaseBucket(NamedTuple):
    """A bucket of the durations of one phase on one kind of device: the index of its bound in BOUNDS_S."""

    phase: Phase
    device: DeviceKind
    bucket: int


@dataclass(frozen=True)
class Tally:
    """The counts. `phase_s` are sums of durations, and `busy_s` the seconds that each worker had a job."""

    attempts: Counter[tuple[DeviceKind, str]] = field(default_factory=Counter)
    variants: Counter[tuple[DeviceKind, str]] = field(default_factory=Counter)
    verdicts: Counter[tuple[DeviceKind, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    phases: Counter[PhaseBucket] = field(default_factory=Counter)
    phase_s: defaultdict[tuple[Phase, DeviceKind], float] = field(default_factory=lambda: defaultdict(float))
    busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def plus(self, other: "Tally") -> "Tally":
        """Both together."""
        whole = Tally()
        for each in fields(self):
            kept = getattr(whole, each.name)
            for part in (getattr(self, each.name), getattr(other, each.name)):
                for key, value in part.items():
                    kept[key] += value
        return whole

    def at_least(self, other: "Tally") -> "Tally":
        """The larger of both, count by count."""
        whole = Tally()
        for each in fields(self):
            mine, theirs, kept = (getattr(tally, each.name) for tally in (self, other, whole))
            for key in {*mine, *theirs}:
                kept[key] = max(mine[key], theirs[key])
        return whole

    def took(self, phase: Phase, device: DeviceKind, lasted: timedelta) -> None:
        """Counts one duration."""
        seconds = max(0.0, lasted.total_seconds())
        self.phases[PhaseBucket(phase, device, bisect_left(BOUNDS_S, seconds))] += 1
        self.phase_s[phase, device] += seconds


class TallyReader:
    """Reads the tally again and again, in one thread. What was withdrawn since stays counted: a counter never falls."""

    def __init__(self) -> None:
        self._settled = Tally()
        self._since = BEGINNING
        self._latest = Tally()

    def read(self, session: Session) -> Tally:
        """The counts of all jobs up to now."""
        # Every job that was posted before this moment is committed and has ended.
        unfinished = Job.state.in_((JobState.QUEUED, JobState.RUNNING))
        query = select(func.min(Job.created_at)).where(unfinished)
        committed = moment(session) - COMMITTED_AFTER
        oldest: datetime | None = session.execute(query).scalar_one()
        until = committed if oldest is None else min(oldest, committed)
        if until > self._since:
            self._settled = self._settled.plus(_count(session, self._since, until))
            self._since = until
        now = self._settled.plus(_count(session, self._since, None))
        self._latest = now.at_least(self._latest)
        return self._latest


def _count(session: Session, since: datetime, until: datetime | None) -> Tally:
    """The counts of the jobs that were posted from `since` on and before `until`."""
    tally = Tally()
    posted = [Job.created_at >= since, *([] if until is None else [Job.created_at < until])]
    _count_attempts(session, posted, tally)
    _count_variants(session, posted, tally)
    return tally


def _count_attempts(session: Session, posted: Sequence[ColumnElement[bool]], tally: Tally) -> None:
    starts, now = _variant_starts(session, posted), moment(session)
    queued_since: Mapping[str, datetime] = {}
    query = (
        select(
            *(Attempt.job_id, Attempt.worker_id, Attempt.started_at, Attempt.ended_at, Attempt.outcome),
            *(Job.device, Job.created_at),
        )
        .join(Job, Job.id == Attempt.job_id)
        .where(*posted)
        .order_by(Attempt.job_id, Attempt.number)
        .execution_options(yield_per=ROWS_AT_ONCE)
    )
    for job, worker, started, ended, outcome, device, posted_at in session.execute(query):
        tally.took(Phase.QUEUED, device, started - queued_since.get(job, posted_at))
        tally.busy_s[worker] += ((ended or now) - started).total_seconds()
        if ended is None:
            continue
        tally.attempts[device, outcome or "unknown"] += 1
        began = [at for at in starts[job] if started <= at <= ended]
        measuring_from = min(began, default=ended)
        tally.took(Phase.PREPARING, device, measuring_from - started)
        if began:
            tally.took(Phase.MEASURING, device, ended - measuring_from)
        queued_since = {job: ended}


def _variant_starts(
    session: Session, posted: Sequence[ColumnElement[bool]]
) -> defaultdict[str, list[datetime]]:
    """When variants of each of these jobs started."""
    query = (
        select(JobEvent.job_id, JobEvent.at)
        .join(Job, Job.id == JobEvent.job_id)
        .where(*posted, JobEvent.kind == "variant_started")
    )
    found: defaultdict[str, list[datetime]] = defaultdict(list)
    for job_id, at in session.execute(query):
        found[job_id].append(at)
    return found


def _count_variants(session: Session, posted: Sequence[ColumnElement[bool]], tally: Tally) -> None:
    verdict = ResultRow.document["verdict"].as_string()
    query = (
        select(Job.device, VariantRow.status, verdict)
        .select_from(VariantRow)
        .join(Job, Job.id == VariantRow.job_id)
        .outerjoin(ResultRow, ResultRow.id == VariantRow.result_id)
        .where(*posted, VariantRow.status.not_in(UNFINISHED))
        .execution_options(yield_per=ROWS_AT_ONCE)
    )
    for device, status, text in session.execute(query):
        tally.variants[device, status.value] += 1
        if text is not None:
            judged = json.loads(text)
            tally.verdicts[device, "valid" if judged["valid"] else "invalid"] += 1
            tally.reasons.update(judged["reasons"])


class Waiting(Frozen):
    """The jobs that wait for workers of one kind of device: how many, and how long the oldest has waited."""

    count: int
    oldest_s: float


class Figures(Frozen):
    """One state of the database. `waiting` has no entry for a kind of device for which nothing is queued."""

    at: datetime
    jobs: dict[JobState, int]
    waiting: dict[DeviceKind, Waiting]
    workers: tuple[WorkerView, ...]


def read(session: Session, lease_s: float) -> Figures:
    """Reads the figures by the indexes of the queue; a worker that is silent for `lease_s` is not alive."""
    at = moment(session)
    query = select(Job.device, func.count(), func.min(Job.created_at)).group_by(Job.device)
    waiting = {
        device: Waiting(count=count, oldest_s=max(0.0, (at - oldest).total_seconds()))
        for device, count, oldest in session.execute(
            query.where(Job.state == JobState.QUEUED, Job.via.is_(None))
        )
    }
    return Figures(
        at=at,
        jobs=queue.counts(session),
        waiting=waiting,
        workers=tuple(workers.list_(session, lease_s=lease_s, now=at)),
    )


MOST_JOBS = 200


class MeasuredGain(Frozen):
    """The speedup of one technique alone, in one job."""

    technique: str
    gain: Gain
    job_id: str
    result_id: str
    model: str | None
    hardware: str
    measured_at: datetime


def alone(session: Session) -> list[MeasuredGain]:
    """The valid ones of the newest jobs that have an attribution, the newest first."""
    query = select(Job.id, Job.attribution).where(Job.attribution.is_not(None))
    found = session.execute(query.order_by(Job.created_at.desc()).limit(MOST_JOBS)).all()
    query_entries = (
        select(VariantRow.job_id, VariantRow.index, LeaderboardEntry)
        .join(LeaderboardEntry, LeaderboardEntry.result_id == VariantRow.result_id)
        .where(VariantRow.job_id.in_([row.id for row in found]))
    )
    places = {(job, index): entry for job, index, entry in session.execute(query_entries)}
    return [gain for row in found for gain in _gains(row.id, row.attribution, places)]


def _gains(
    job: str, document: object, places: dict[tuple[str, int], LeaderboardEntry]
) -> Iterator[MeasuredGain]:
    try:
        rows = Attribution.model_validate(document).rows
    except ValidationError:  # of another version
        return
    for row in rows:
        entry = places.get((job, row.index))
        if entry is not None and row.technique and row.alone is not None and row.alone.valid:
            yield entry.as_view(
                MeasuredGain,
                technique=row.technique,
                gain=row.alone,
                job_id=job,
                hardware=entry.hardware_class,
            )
