"""The tables. Every change here needs a migration: `alembic revision --autogenerate`, then read it."""

from datetime import datetime
from typing import Any, ClassVar

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
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from optigpu.documents.devices import DeviceSource, InputSource, ReportState, RunnerName
from optigpu.documents.views import Standing, Want, Withdrawn
from optigpu.store.types import Digest, Document, Identifier, PlainText, UtcDateTime, choice
from optigpu.vocabulary import DeviceKind, JobState, Role, VariantStatus

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
        DeviceKind: choice(DeviceKind),
        DeviceSource: choice(DeviceSource),
        InputSource: choice(InputSource),
        JobState: choice(JobState),
        ReportState: choice(ReportState),
        Role: choice(Role),
        RunnerName: choice(RunnerName),
        Standing: choice(Standing),
        Withdrawn: choice(Withdrawn),
        VariantStatus: choice(VariantStatus),
        Want: choice(Want),
    }


class Job(Base):
    """A job and its state. Its row lock orders all writes that belong to it."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_created_at_id", "created_at", "id"),
        Index("ix_jobs_state_created_at_id", "state", "created_at", "id"),
        Index(
            "ix_jobs_queue",
            "device",
            "created_at",
            "id",
            postgresql_where=text("state = 'queued'"),
            sqlite_where=text("state = 'queued'"),
        ),
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


class JobNeed(Base):
    """One thing that a job asks for of a worker besides a device, as `optigpu.job.needs` lists them."""

    __tablename__ = "job_needs"

    job_id: Mapped[Identifier] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    kind: Mapped[Want] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)


class Attempt(Base):
    """One time that a worker took a job. The next attempt goes on from it on the same host, device and version.

    `device` is the GPU's UUID, or on a CPU the hardware class; null in attempts from before it was stored.
    """

    __tablename__ = "attempts"

    job_id: Mapped[Identifier] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    worker_id: Mapped[str]
    host_id: Mapped[str]
    device: Mapped[str | None]
    version: Mapped[str]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str | None]


class VariantRow(Base):
    """The state of one variant of a job."""

    __tablename__ = "variants"

    job_id: Mapped[Identifier] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    role: Mapped[Role]
    label: Mapped[str]
    status: Mapped[VariantStatus]
    reason: Mapped[str | None]
    result_id: Mapped[Identifier | None] = mapped_column(ForeignKey("results.id"))


class EnvironmentRow(Base):
    """The environments of results, each stored once."""

    __tablename__ = "environments"

    digest: Mapped[Digest] = mapped_column(primary_key=True)
    document: Mapped[dict[str, Any]]


class ResultRow(Base):
    """A result as it was stored. In `document` the environment is null: it has its own table."""

    __tablename__ = "results"

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    job_id: Mapped[Identifier | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[datetime]
    environment_digest: Mapped[Digest] = mapped_column(ForeignKey("environments.digest"))
    document: Mapped[dict[str, Any]]


class MetricRow(Base):
    """One metric of a result: what is sorted and filtered by.

    `low` and `high` are its 95% interval: null without one, both the value for what is counted (COUNTED_METRICS).
    """

    __tablename__ = "metrics"

    result_id: Mapped[Identifier] = mapped_column(
        ForeignKey("results.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
    low: Mapped[float | None]
    high: Mapped[float | None]


class SamplesRow(Base):
    """Raw samples of one metric: compressed doubles, and how many belong to each replicate."""

    __tablename__ = "samples"

    result_id: Mapped[Identifier] = mapped_column(
        ForeignKey("results.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    lengths: Mapped[list[Any]]
    data: Mapped[bytes]


class ArtifactRow(Base):
    """A file that a meter left with a result, zlib-compressed; null, with the reason, where it could not be kept.

    Size and SHA-256 are those of the file itself.
    """

    __tablename__ = "artifacts"

    result_id: Mapped[Identifier] = mapped_column(
        ForeignKey("results.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    media_type: Mapped[str]
    size_bytes: Mapped[int | None]
    sha256: Mapped[Digest | None]
    reason: Mapped[str | None]
    data: Mapped[bytes | None]


class JobEvent(Base):
    """Something that happened to a job; never changed. Only progress is removed, when newer progress comes."""

    __tablename__ = "job_events"

    job_id: Mapped[Identifier] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]


class Worker(Base):
    """A process that serves jobs."""

    __tablename__ = "workers"

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
    selftest: Mapped[dict[str, Any] | None]
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    job_id: Mapped[Identifier | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"))


class ApiKey(Base):
    """A key of the service. Only its hash is kept; the prefix is for people to tell keys apart."""

    __tablename__ = "api_keys"

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    name: Mapped[str]
    prefix: Mapped[str]
    hash: Mapped[Digest] = mapped_column(unique=True)
    scopes: Mapped[list[Any]]
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class LeaderboardEntry(Base):
    """What the leaderboard knows of one result: its place, and whether it is the current result there.

    A place is a variant of a workload on a class of hardware, from one source; `optigpu.store.standings` chooses the
    current one of its results. `score` is the primary metric, negated where lower is better, so that more is always
    better. `size_bytes` is what the Pareto flag weighs it against: the peak on an accelerator, the weights on a CPU.
    `techniques` is "|name|name|", to be searched; `warnings` and `reasons` are the verdict's, separated by spaces;
    `versions` are those that are compared, by package; `summary` holds what is only shown.
    """

    __tablename__ = "leaderboard"
    __table_args__ = (
        Index("ix_leaderboard_place", "workload_digest", "variant_digest", "hardware_class", "source"),
        Index(
            "ix_leaderboard_pareto",
            *("workload_digest", "hardware_class", "device", "source", "standing", "score"),
        ),
    )

    result_id: Mapped[Identifier] = mapped_column(
        ForeignKey("results.id", ondelete="CASCADE"), primary_key=True
    )
    workload_digest: Mapped[Digest]
    variant_digest: Mapped[Digest]
    hardware_class: Mapped[str]
    source: Mapped[str]
    standing: Mapped[Standing]
    measured_at: Mapped[datetime]
    workload: Mapped[str]
    model: Mapped[str | None]
    backend: Mapped[str]
    device: Mapped[DeviceKind]
    techniques: Mapped[str]
    primary_metric: Mapped[str]
    replicates: Mapped[int]
    warnings: Mapped[str]
    reasons: Mapped[str]
    versions: Mapped[dict[str, Any]]
    score: Mapped[float | None]
    size_bytes: Mapped[float | None]
    summary: Mapped[dict[str, Any]]


class Tombstone(Base):
    """What stays of a result or a job that was withdrawn: who withdrew it, when and why.

    `withdrawn_by` is the name of the key, which may have been revoked since; `key_id` is null without a key.
    """

    __tablename__ = "tombstones"

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    kind: Mapped[Withdrawn]
    job_id: Mapped[Identifier | None]
    withdrawn_at: Mapped[datetime]
    withdrawn_by: Mapped[str]
    key_id: Mapped[str | None]
    reason: Mapped[str]


class DeviceInvite(Base):
    """An invitation to enrol one device. `code` is the public group of what the operator was shown.

    `verifier` is SHA-256 of the secret groups, null once it is claimed; `claim_digest` then tells a retry from another
    claim.
    """

    __tablename__ = "device_invites"

    code: Mapped[str] = mapped_column(String(4), primary_key=True)
    verifier: Mapped[Digest | None]
    name: Mapped[str | None]
    source: Mapped[DeviceSource]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    claimed_at: Mapped[datetime | None]
    claim_digest: Mapped[Digest | None]
    device_id: Mapped[Identifier | None] = mapped_column(ForeignKey("devices.id", ondelete="CASCADE"))


class Device(Base):
    """An edge device, with what it last said of itself. Its row lock orders all writes that belong to it."""

    __tablename__ = "devices"

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


class DeviceKey(Base):
    """One version of a device's key. `secret` is null once a later version was used or the device was revoked."""

    __tablename__ = "device_keys"

    device_id: Mapped[Identifier] = mapped_column(
        ForeignKey("devices.id", ondelete="CASCADE"), primary_key=True
    )
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    secret: Mapped[bytes | None]
    created_at: Mapped[datetime]
    first_used_at: Mapped[datetime | None]


class DeviceBoot(Base):
    """One boot of a device: the highest sequence of its signed requests."""

    __tablename__ = "device_boots"

    device_id: Mapped[Identifier] = mapped_column(
        ForeignKey("devices.id", ondelete="CASCADE"), primary_key=True
    )
    boot_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    first_seen_at: Mapped[datetime]
    sequence: Mapped[int]


class DeviceRun(Base):
    """The start of a run, as the server saw it. A repeated request (boot and sequence) finds the same row."""

    __tablename__ = "device_runs"
    __table_args__ = (UniqueConstraint("device_id", "boot_id", "sequence"),)

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    device_id: Mapped[Identifier] = mapped_column(ForeignKey("devices.id", ondelete="CASCADE"))
    boot_id: Mapped[str] = mapped_column(String(16))
    sequence: Mapped[int]
    model_sha256: Mapped[Digest]
    started_at: Mapped[datetime]


class DeviceReportRow(Base):
    """A report as it was received, what was made of it, and what the edge leaderboard sorts by.

    `received_at` is when the server had the message that brought it; `document` is the report, and `body_digest` is
    that of its canonical JSON. `energy_per_inference_uj` includes the idle power.
    """

    __tablename__ = "device_reports"
    __table_args__ = (
        UniqueConstraint("device_id", "boot_id", "sequence"),
        Index("ix_device_reports_device_id_id", "device_id", "id"),
        Index("ix_device_reports_run_id", "run_id"),
        Index("ix_device_reports_partition", "model_sha256", "input_source", "runner", "ranked"),
    )

    id: Mapped[Identifier] = mapped_column(primary_key=True)
    device_id: Mapped[Identifier] = mapped_column(ForeignKey("devices.id", ondelete="CASCADE"))
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


class EdgeModel(Base):
    """A converted model that devices may report on, by the SHA-256 of its file; `document` is its manifest."""

    __tablename__ = "edge_models"

    sha256: Mapped[Digest] = mapped_column(primary_key=True)
    rankable: Mapped[bool]
    added_at: Mapped[datetime]
    document: Mapped[dict[str, Any]]
