"""The tables. Every change here needs a migration: `alembic revision --autogenerate`, then read it."""

from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any, ClassVar, TypeVar

from sqlalchemy import (
    BigInteger,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy import Enum as Choice
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from optigpu.documents.devices import DeviceSource, InputSource, ReportState, RunnerName
from optigpu.documents.views import LaunchState, Standing, Want, Withdrawn
from optigpu.store.statements import Digest, Document, Identifier, JsonText, PlainText, UtcDateTime
from optigpu.vocabulary import DeviceKind, FailureKind, Frozen, JobState, Role, Scheduler, VariantStatus

View = TypeVar("View", bound=Frozen)

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Maps Python's types to columns that behave alike on both databases."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: PlainText,
        int: BigInteger,
        float: Double,
        bytes: LargeBinary,
        datetime: UtcDateTime,
        dict[str, Any]: Document,
        list[Any]: Document,
        list[str]: Document,
        dict[str, str]: Document,
        Enum: Choice(Enum, native_enum=False, length=16, values_callable=lambda kind: [*map(str, kind)]),
    }

    def __init_subclass__(cls, table: str) -> None:
        cls.__tablename__ = table
        super().__init_subclass__()

    def as_view(self, view: type[View], **others: object) -> View:
        """The view whose fields are the row's columns of the same names, and `others`."""
        names = self.__table__.columns.keys() & view.model_fields.keys()
        return view.model_validate({name: getattr(self, name) for name in names} | others)


_part_of = partial(ForeignKey, ondelete="CASCADE")
"""A reference to the row with which one is removed."""


def _partial(name: str, where: str, *columns: str, unique: bool = False) -> Index:
    """An index of some rows; only a query that names a state literally can use it (`transitions.in_state`)."""
    return Index(name, *columns, unique=unique, postgresql_where=text(where), sqlite_where=text(where))


class Job(Base, table="jobs"):
    """A job and its state. Its row lock orders all writes that belong to it."""

    __table_args__ = (
        Index("ix_jobs_created_at_id", "created_at", "id"),
        Index("ix_jobs_state_created_at_id", "state", "created_at", "id"),
        _partial(
            "ix_jobs_queue", "state = 'queued'", "device", "lane", "precedence", "created_at", "id", "owner"
        ),
        _partial("ix_jobs_leases", "state = 'running'", "lease_until"),
        _partial("ix_jobs_deadline", "state = 'queued' AND deadline IS NOT NULL", "deadline"),
        _partial(
            "ix_jobs_via", "state = 'queued' AND via IS NOT NULL", "via", "precedence", "created_at", "id"
        ),
        _partial("ix_jobs_history", "state = 'succeeded'", "device", "workload", "plan", "ended_at"),
    )

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    state: Mapped[JobState]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    reason: Mapped[str | None]

    # What was asked for. The spec is the document as it was accepted; the columns are what is filtered by.
    schema_version: Mapped[int]
    spec: Mapped[dict[str, Any]]
    workload: Mapped[str]
    model: Mapped[str | None]
    plan: Mapped[str]
    backend: Mapped[str]
    device: Mapped[DeviceKind]
    gpu_pattern: Mapped[str | None]  # a LIKE pattern in lower case; null takes any GPU
    min_vram_bytes: Mapped[int]
    via: Mapped[Scheduler | None]  # a scheduler's pilot takes it, and no other worker

    # Whose turn it is. `owner` is the key's id, or "open"; `lane` is one for all jobs of an owner that ask for the same
    # of a worker, and null in jobs from before it was stored; `precedence` is the priority negated, so that one index
    # in ascending order has the order of a lane.
    owner: Mapped[str]
    lane: Mapped[Digest | None]
    precedence: Mapped[int]
    not_before: Mapped[datetime | None]
    deadline: Mapped[datetime | None]

    # What became of its attempts. Those up to the number `forgiven` no longer count against it.
    failure: Mapped[FailureKind | None]
    parked: Mapped[bool]
    forgiven: Mapped[int]

    # Digests, because a key may be of any length and hold any character. Null is equal to no other null.
    idempotency_digest: Mapped[Digest | None] = mapped_column(String(64), unique=True)
    spec_digest: Mapped[Digest]

    # Who has it. `fencing` counts claims and never goes back; `last_sequence` is that of the newest event.
    worker_id: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    fencing: Mapped[int]
    attempt: Mapped[int]
    last_sequence: Mapped[int]
    progress: Mapped[dict[str, Any]]
    attribution: Mapped[dict[str, Any] | None]


class JobNeed(Base, table="job_needs"):
    """One thing that a job asks for of a worker besides a device, as `optigpu.job.plan` lists them."""

    job_id: Mapped[Identifier] = mapped_column(_part_of("jobs.id"), primary_key=True)
    kind: Mapped[Want] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)


class Attempt(Base, table="attempts"):
    """One time that a worker took a job. The next attempt goes on from it on the same host, device and version.
    `device` is the GPU's UUID, or on a CPU the hardware class; null in attempts from before it was stored."""

    __table_args__ = (Index("ix_attempts_ended_at", "ended_at"),)
    job_id: Mapped[Identifier] = mapped_column(_part_of("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    worker_id: Mapped[str]
    host_id: Mapped[str]
    device: Mapped[str | None]
    version: Mapped[str]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str | None]


class LaunchRow(Base, table="launches"):
    """One time that a job was handed to a scheduler. `reference` is the scheduler's id of it, null until it is known.
    Of the pilot's token only the hash is kept. `fencing` is the job's when it was handed over: as long as it is the
    same no pilot has claimed the job."""

    __table_args__ = (
        _partial("ix_launches_live", "ended_at IS NULL", "job_id", unique=True),
        Index("ix_launches_job_id_created_at", "job_id", "created_at"),
    )

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    job_id: Mapped[Identifier] = mapped_column(_part_of("jobs.id"))
    scheduler: Mapped[Scheduler]
    state: Mapped[LaunchState]
    reference: Mapped[str | None]
    reason: Mapped[str | None]
    fencing: Mapped[int]
    token_hash: Mapped[Digest] = mapped_column(unique=True)
    expires_at: Mapped[datetime]
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class LauncherRow(Base, table="launchers"):
    """The launcher of a scheduler: when it was last seen, and why it can hand over nothing, if it cannot."""

    scheduler: Mapped[Scheduler] = mapped_column(primary_key=True)
    seen_at: Mapped[datetime]
    problem: Mapped[str | None]


class VariantRow(Base, table="variants"):
    """The state of one variant of a job. `printed` is the end of what its processes printed, for an operator."""

    __table_args__ = (Index("ix_variants_result_id", "result_id"),)
    job_id: Mapped[Identifier] = mapped_column(_part_of("jobs.id"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    role: Mapped[Role]
    label: Mapped[str]
    status: Mapped[VariantStatus]
    reason: Mapped[str | None]
    result_id: Mapped[Identifier | None] = mapped_column(ForeignKey("results.id"))
    printed: Mapped[str | None]


class EnvironmentRow(Base, table="environments"):
    """The environments of results, each stored once."""

    digest: Mapped[Digest] = mapped_column(primary_key=True)
    document: Mapped[dict[str, Any]]


class ResultRow(Base, table="results"):
    """A result as it was stored. In `document` the environment is null: it has its own table."""

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    job_id: Mapped[Identifier | None] = mapped_column(_part_of("jobs.id"), index=True)
    created_at: Mapped[datetime]
    environment_digest: Mapped[Digest] = mapped_column(ForeignKey("environments.digest"))
    document: Mapped[dict[str, Any]]


_CURRENT_OF_HARDWARE = text("standing = 'current' AND hardware_class IS NOT NULL")
"""PostgreSQL uses the index only where a class of hardware is asked for. It expects few rows of a filtered board, and
would sort all of them rather than read the order of `ix_metrics_order`."""


class MetricRow(Base, table="metrics"):
    """One metric of a result: what is sorted and filtered by. `low` and `high` are its 95% interval: null without one,
    both the value for what is counted (COUNTED_METRICS). `summary` is the whole of it. The next columns order the rows
    of a board: `unsure` says that there is no interval, and the smaller `place` is the better: the value, or its
    negative where more is better. The last ones are of the result, for the indexes: `stack` is the names of its
    techniques, each between two spaces, `clean` is true without warnings. They are null in rows that an earlier version
    of OptiGPU writes."""

    __table_args__ = (
        Index(
            "ix_metrics_order",
            *("board", "name", "standing", "unsure", "place", "result_id"),
            postgresql_include=["hardware_class", "backend", "stack", "top1", "kld", "clean"],
        ),
        Index(
            "ix_metrics_hardware",
            *("board", "name", "hardware_class", "unsure", "place", "result_id"),
            postgresql_include=["backend", "stack", "top1", "kld", "clean"],
            postgresql_where=_CURRENT_OF_HARDWARE,
            sqlite_where=_CURRENT_OF_HARDWARE,
        ),
    )

    result_id: Mapped[Identifier] = mapped_column(_part_of("results.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
    low: Mapped[float | None]
    high: Mapped[float | None]
    summary: Mapped[dict[str, Any]] = mapped_column(JsonText)
    board: Mapped[int]
    standing: Mapped[Standing]
    unsure: Mapped[bool]
    place: Mapped[float]

    hardware_class: Mapped[str | None]
    backend: Mapped[str | None]
    stack: Mapped[str | None]
    top1: Mapped[float | None]
    kld: Mapped[float | None]
    clean: Mapped[bool | None]


class SamplesRow(Base, table="samples"):
    """Raw samples of one metric: compressed doubles, and how many belong to each replicate."""

    result_id: Mapped[Identifier] = mapped_column(_part_of("results.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    lengths: Mapped[list[Any]]
    data: Mapped[bytes]


class ArtifactRow(Base, table="artifacts"):
    """A file that a meter left with a result, zlib-compressed, with its own size and SHA-256; or the reason why it was
    not kept."""

    result_id: Mapped[Identifier] = mapped_column(_part_of("results.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    media_type: Mapped[str]
    size_bytes: Mapped[int | None]
    sha256: Mapped[Digest | None]
    reason: Mapped[str | None]
    data: Mapped[bytes | None]


class JobEvent(Base, table="job_events"):
    """Something that happened to a job; never changed. Only progress is removed, when newer progress comes."""

    job_id: Mapped[Identifier] = mapped_column(_part_of("jobs.id"), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]


class Worker(Base, table="workers"):
    """A process that serves jobs."""

    id: Mapped[str] = mapped_column(primary_key=True)
    host_id: Mapped[str]
    hardware_class: Mapped[str]
    device: Mapped[DeviceKind]
    gpus: Mapped[list[Any]]
    memory_bytes: Mapped[int]
    vram_bytes: Mapped[int | None]
    backends: Mapped[list[Any]]
    packages: Mapped[list[str]]
    models: Mapped[list[str]]
    downloads: Mapped[bool]
    version: Mapped[str]
    software: Mapped[dict[str, str]]
    selftest: Mapped[dict[str, Any] | None]
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    job_id: Mapped[Identifier | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"))


class ApiKey(Base, table="api_keys"):
    """A key of the service. Only its hash is kept; the prefix is for people to tell keys apart."""

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    name: Mapped[str]
    prefix: Mapped[str]
    hash: Mapped[Digest] = mapped_column(unique=True)
    scopes: Mapped[list[Any]]
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]


class SignIn(Base, table="sign_ins"):
    """A browser that was signed in with a key. Only the hash of its cookie is kept."""

    __table_args__ = (Index("ix_sign_ins_expires_at", "expires_at"),)
    hash: Mapped[Digest] = mapped_column(primary_key=True)
    key_id: Mapped[Identifier] = mapped_column(_part_of("api_keys.id"))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class BoardRow(Base, table="boards"):
    """A board of the leaderboard: results of one workload, with its shapes and its model, from one source. `number` is
    made of the two. `newest` is the newest result's id: ids begin with their time. `invalid` counts the board's invalid
    results by their reasons, which are separated by spaces."""

    __table_args__ = (
        Index("ix_boards_source_newest", "source", "newest"),
        Index("ix_boards_source_model_newest", "source", "model", "newest"),
        Index("ix_boards_workload_digest", "workload_digest"),
    )

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    workload_digest: Mapped[Digest]
    source: Mapped[str]
    workload: Mapped[str]
    model: Mapped[str | None]
    primary_metric: Mapped[str]
    document: Mapped[dict[str, Any]]
    newest: Mapped[Identifier]
    invalid: Mapped[dict[str, Any]]


class LeaderboardEntry(Base, table="leaderboard"):
    """What the leaderboard knows of one result: its place, and whether it is the current result there. A place is a
    variant on a class of hardware, on one board; `optigpu.store.standings` chooses the current one of its results, and
    `earlier` counts the others for it. `age` orders versions. `score` is the primary metric, negated where lower is
    better. `size_bytes` is the peak on an accelerator, the weights on a CPU; `energy_j` that of a token or an image.
    The four, with `kld`, are what `pareto` weighs; it is null where nothing is weighed. `chance` is how rare the loss
    is against the result that it replaced, 1 without a loss, null where nothing was compared. `warnings` and `reasons`
    are the verdict's, separated by spaces. `shown` has the fields of its row that stay as they are. `edge` is what the
    edge leaderboard needs of what classifies images."""

    __table_args__ = (
        Index("ix_leaderboard_place", "board", "variant_digest", "hardware_class"),
        Index("ix_leaderboard_pareto", "board", "hardware_class", "device", "pareto"),
        Index("ix_leaderboard_hardware", "hardware_class", "board", "standing"),
        Index("ix_leaderboard_backend", "backend", "board", "standing"),
        Index("ix_leaderboard_workload", "workload", "model", "measured_at"),
        Index("ix_leaderboard_chance", "chance"),
    )

    result_id: Mapped[Identifier] = mapped_column(_part_of("results.id"), primary_key=True)
    board: Mapped[int] = mapped_column(ForeignKey("boards.number"))
    variant_digest: Mapped[Digest]
    hardware_class: Mapped[str]
    source: Mapped[str]
    standing: Mapped[Standing]
    superseded: Mapped[bool]
    earlier: Mapped[int]
    measured_at: Mapped[datetime]
    workload: Mapped[str]
    model: Mapped[str | None]
    backend: Mapped[str]
    device: Mapped[DeviceKind]
    replicates: Mapped[int]
    warnings: Mapped[str]
    reasons: Mapped[str]
    age: Mapped[bytes]
    score: Mapped[float | None]
    size_bytes: Mapped[float | None]
    kld: Mapped[float | None]
    top1: Mapped[float | None]
    energy_j: Mapped[float | None]
    pareto: Mapped[bool | None]
    chance: Mapped[float | None]
    shown: Mapped[dict[str, Any]] = mapped_column(JsonText)
    edge: Mapped[dict[str, Any] | None]


class EntryTechnique(Base, table="entry_techniques"):
    """A technique in the stack of an entry of the leaderboard."""

    __table_args__ = (Index("ix_entry_techniques_name_board", "name", "board"),)
    result_id: Mapped[Identifier] = mapped_column(_part_of("leaderboard.result_id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    board: Mapped[int]


class KnownName(Base, table="known_names"):
    """A name that a filter of the leaderboard can have, since a result had it."""

    filter: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)


class Revision(Base, table="revisions"):
    """The revision of a part of the database; see `optigpu.store.database`."""

    part: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[Identifier]


class Tombstone(Base, table="tombstones"):
    """What stays of a withdrawn result or job. `withdrawn_by` is the name of the key; `key_id` is null without a
    key."""

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    kind: Mapped[Withdrawn]
    job_id: Mapped[Identifier | None]
    withdrawn_at: Mapped[datetime]
    withdrawn_by: Mapped[str]
    key_id: Mapped[str | None]
    reason: Mapped[str]


class DeviceInvite(Base, table="device_invites"):
    """An invitation to enrol one device. `code` is the public group of what the operator was shown. `verifier` is
    SHA-256 of the secret groups, null once it is claimed; `claim_digest` then tells a retry from another claim."""

    code: Mapped[str] = mapped_column(String(4), primary_key=True)
    verifier: Mapped[Digest | None]
    name: Mapped[str | None]
    source: Mapped[DeviceSource]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    claimed_at: Mapped[datetime | None]
    claim_digest: Mapped[Digest | None]
    device_id: Mapped[Identifier | None] = mapped_column(_part_of("devices.id"))


class Device(Base, table="devices"):
    """An edge device, with what it last said of itself. Its row lock orders all writes that belong to it."""

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    name: Mapped[str | None]
    board: Mapped[str]
    source: Mapped[DeviceSource]
    firmware_sha256: Mapped[Digest]
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    rotate_requested_at: Mapped[datetime | None]

    # Of the newest message of the newest boot.
    boot_id: Mapped[str | None] = mapped_column(String(16))
    clock_synchronised: Mapped[bool | None]
    agent_version: Mapped[str | None]
    reset_reason: Mapped[str | None]
    rssi: Mapped[int | None]
    heap_free: Mapped[int | None]
    queue_depth: Mapped[int | None]
    dropped: Mapped[int | None]
    uptime_us: Mapped[int | None]


class DeviceKey(Base, table="device_keys"):
    """One version of a device's key. `secret` is null once a later version was used or the device was revoked."""

    device_id: Mapped[Identifier] = mapped_column(_part_of("devices.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    secret: Mapped[bytes | None]
    created_at: Mapped[datetime]
    first_used_at: Mapped[datetime | None]


class DeviceBoot(Base, table="device_boots"):
    """One boot of a device: the highest sequence of its signed requests."""

    device_id: Mapped[Identifier] = mapped_column(_part_of("devices.id"), primary_key=True)
    boot_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    first_seen_at: Mapped[datetime]
    sequence: Mapped[int]


class DeviceRun(Base, table="device_runs"):
    """The start of a run, as the server saw it. A repeated request (boot and sequence) finds the same row."""

    __table_args__ = (UniqueConstraint("device_id", "boot_id", "sequence"),)
    id: Mapped[Identifier] = mapped_column(primary_key=True)
    device_id: Mapped[Identifier] = mapped_column(_part_of("devices.id"))
    boot_id: Mapped[str] = mapped_column(String(16))
    sequence: Mapped[int]
    model_sha256: Mapped[Digest]
    started_at: Mapped[datetime]


class DeviceReportRow(Base, table="device_reports"):
    """A report as it was received, what was made of it, and what the edge leaderboard sorts by. `received_at` is when
    its message came, `body_digest` that of its canonical JSON. `energy_per_inference_uj` includes the idle power."""

    __table_args__ = (
        UniqueConstraint("device_id", "boot_id", "sequence"),
        Index("ix_device_reports_device_id_id", "device_id", "id"),
        Index("ix_device_reports_run_id", "run_id"),
        Index("ix_device_reports_partition", "model_sha256", "input_source", "runner", "ranked"),
    )

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    device_id: Mapped[Identifier] = mapped_column(_part_of("devices.id"))
    boot_id: Mapped[str] = mapped_column(String(16))
    sequence: Mapped[int]
    run_id: Mapped[Identifier | None]
    received_at: Mapped[datetime]
    model_sha256: Mapped[Digest]
    input_source: Mapped[InputSource]
    runner: Mapped[RunnerName]
    board: Mapped[str]
    source: Mapped[DeviceSource]
    state: Mapped[ReportState]
    ranked: Mapped[bool]
    reasons: Mapped[list[str]]
    flags: Mapped[list[str]]
    latency_p50_us: Mapped[int | None]
    count: Mapped[int]
    energy_per_inference_uj: Mapped[float | None]
    power_source: Mapped[str]
    body_digest: Mapped[Digest]
    document: Mapped[dict[str, Any]]


class OthersRow(Base, table="measured_by_others"):
    """A file of another tool, as it was imported; `digest` is its document's."""

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    digest: Mapped[Digest] = mapped_column(String(64), unique=True)
    imported_at: Mapped[datetime]
    document: Mapped[dict[str, object]] = mapped_column(Document)


class EdgeModel(Base, table="edge_models"):
    """A converted model that devices may report on, by the SHA-256 of its file; `document` is its manifest."""

    sha256: Mapped[Digest] = mapped_column(primary_key=True)
    rankable: Mapped[bool]
    added_at: Mapped[datetime]
    document: Mapped[dict[str, Any]]


class EdgeStanding(Base, table="edge_standings"):
    """The report of a device that stands on the edge leaderboard, and the newest that does not rank. A place is a
    device in a partition of model, input and runner; `optigpu.store.edge_reports` chooses its reports."""

    model_sha256: Mapped[Digest] = mapped_column(primary_key=True)
    input_source: Mapped[InputSource] = mapped_column(primary_key=True)
    runner: Mapped[RunnerName] = mapped_column(primary_key=True)
    device_id: Mapped[Identifier] = mapped_column(_part_of("devices.id"), primary_key=True)
    ranked: Mapped[bool] = mapped_column(primary_key=True)
    report_id: Mapped[Identifier] = mapped_column(_part_of("device_reports.id"))


class AuditRow(Base, table="audit_log"):
    """One change, by whom and from where. Rows stay as they are. `target` is the id of what was changed. `key_id`,
    `address` and `request_id` are null where there was none, as at the command line."""

    __table_args__ = (Index("ix_audit_log_target_id", "target", "id"),)
    id: Mapped[Identifier] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    action: Mapped[str]
    target: Mapped[str]
    name: Mapped[str]
    key_id: Mapped[Identifier | None]
    address: Mapped[str | None]
    request_id: Mapped[str | None]
    details: Mapped[dict[str, Any]]


class Webhook(Base, table="webhooks"):
    """Where events are sent. The secret signs what is sent, so it is kept as it is and not as a hash."""

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    url: Mapped[str]
    secret: Mapped[str]
    events: Mapped[list[str]]
    created_at: Mapped[datetime]
    created_by: Mapped[str]


class WebhookDelivery(Base, table="webhook_deliveries"):
    """The outbox: an event for one webhook. `next_at` is when it is sent, or sent again, and while a process sends it,
    when others may; null once it was delivered, or after the last attempt. `body` are the bytes that are signed."""

    __table_args__ = (
        Index("ix_webhook_deliveries_next_at", "next_at"),
        Index("ix_webhook_deliveries_webhook_id_id", "webhook_id", "id"),
    )

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    webhook_id: Mapped[Identifier] = mapped_column(_part_of("webhooks.id"))
    event: Mapped[str]
    body: Mapped[str]
    created_at: Mapped[datetime]
    attempts: Mapped[int]
    next_at: Mapped[datetime | None]
    delivered_at: Mapped[datetime | None]
    last_error: Mapped[str | None]


class GateRow(Base, table="gates"):
    """What a gate found, in a series of them. `chance` is the outcome's; `told` says that webhooks were told."""

    __table_args__ = (Index("ix_gates_series_id", "series", "id"),)
    id: Mapped[Identifier] = mapped_column(primary_key=True)
    series: Mapped[str]
    at: Mapped[datetime]
    created_by: Mapped[str]
    chance: Mapped[float]
    told: Mapped[bool]
    outcome: Mapped[Mapping[str, object]] = mapped_column(Document)


class AlertRule(Base, table="alert_rules"):
    """A question to each new current result of a place on the leaderboard; `optigpu.store.alerts` asks it. `threshold`
    is the bound of a rule of that kind, null for the others. `fired_for` is the last result that it fired for, `chance`
    how rare the newest change was that it looked at, null where there was none to tell."""

    __table_args__ = (Index("ix_alert_rules_place", "board", "variant_digest", "hardware_class"),)
    id: Mapped[Identifier] = mapped_column(primary_key=True)
    board: Mapped[int]
    variant_digest: Mapped[Digest]
    hardware_class: Mapped[str]
    result_id: Mapped[Identifier]
    label: Mapped[str]
    metric: Mapped[str]
    kind: Mapped[str]
    threshold: Mapped[float | None]
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    fired_at: Mapped[datetime | None]
    fired_for: Mapped[Identifier | None]
    chance: Mapped[float | None]
