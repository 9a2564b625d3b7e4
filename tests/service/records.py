"""Small, valid things to store: a spec, a worker, a result, an outcome, a device with its reports, a manifest; and what
many tests do with them. Nothing here was measured."""

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

from api import device_identity, device_messages
from api.device_messages import ClaimRequest, DeviceMessage
from api.openapi import GATES
from benchmarks import signing_device
from optigpu.documents.administration import AlertKind, AlertRequest
from optigpu.documents.devices import DeviceReport, DeviceSource, Reason, ReportState
from optigpu.documents.events import PlannedVariant, Printed
from optigpu.documents.facts import EnergyFacts, NetworkFacts, RunFacts, WeightFacts
from optigpu.documents.gates import GateRequest
from optigpu.documents.manifest import ModelManifest
from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.result import (
    Environment,
    MetricSummary,
    Outcome,
    Result,
    Samples,
    VariantSummary,
    Verdict,
    VerdictReason,
    VerdictWarning,
)
from optigpu.documents.views import Board, LeaderboardRow
from optigpu.job.spec import JobSpec, digest
from optigpu.store import (
    alerts,
    devices,
    edge_reports,
    events,
    gates,
    jobs,
    keys,
    leaderboard,
    leases,
    outcomes,
    results,
    standings,
)
from optigpu.store.database import Database, Session, moment
from optigpu.store.devices import DeviceRequest, NewDevice
from optigpu.store.edge_reports import JudgedReport
from optigpu.store.leases import Lease
from optigpu.store.results import Artifact
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import METRICS, DeviceKind, JobState, Role, VariantStatus, new_id
from tests.service.device_client import Claim, invited, manifest, message, report

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def told(session: Session, job_id: str, kind: str, data: dict[str, Any]) -> int:
    """Adds an event to a job, as whoever has locked it does, and returns its number."""
    return events.record(session, events.locked(session, job_id), kind, data, moment(session))


def a_spec(**changes: Any) -> JobSpec:
    """A matmul job for a CPU."""
    return JobSpec.model_validate({"workload": {"kind": "matmul", "sizes": [64]}} | changes)


def a_worker(name: str = "worker-1", **changes: Any) -> WorkerInfo:
    """A worker for the CPU of one host."""
    fields: dict[str, Any] = {
        "id": name,
        "host_id": "host-1",
        "hardware_class": "1x Test CPU",
        "device": DeviceKind.CPU,
        "memory_bytes": 2**34,
        "backends": ("torch",),
        "version": "0.1.0",
    }
    return WorkerInfo.model_validate(fields | changes)


def a_gpu_worker(name: str = "worker-gpu", **changes: Any) -> WorkerInfo:
    """A worker for one H200."""
    fields = {
        "device": DeviceKind.CUDA,
        "hardware_class": "1x NVIDIA H200 131 GiB",
        "gpus": ("NVIDIA H200",),
        "gpu_uuid": "GPU-a",
        "vram_bytes": 141 * 10**9,
    }
    return a_worker(name, **(fields | changes))


def a_plan(*labels: str) -> tuple[PlannedVariant, ...]:
    """Variants with these labels, numbered from 0."""
    return tuple(PlannedVariant(index=i, role=Role.SINGLE, label=label) for i, label in enumerate(labels))


def a_metric(name: str, value: float | None, ci: tuple[float, float] | None = None) -> MetricSummary:
    """The summary of one metric."""
    unit, better, _ = METRICS[name]
    reason = "not measured" if value is None else None
    return MetricSummary(unit=unit, better=better, value=value, ci=ci, n=3, replicates=1, reason=reason)


def a_result(
    metrics: dict[str, MetricSummary] | None = None,
    *,
    index: int = 0,
    stack: tuple[str, ...] = (),
    workload: str = "generate",
    size: int = 1,
    model: str = "preset:gpt2",
    hardware: str = "1x Test CPU",
    device: DeviceKind = DeviceKind.CPU,
    measured_at: datetime = NOON,
    valid: bool = True,
    reasons: tuple[VerdictReason, ...] = (VerdictReason.OUTPUT_INVALID,),
    warnings: tuple[VerdictWarning, ...] = (VerdictWarning.SINGLE_REPLICATE,),
    replicates: int = 1,
    software: dict[str, str] | None = None,
    facts: RunFacts | None = None,
    **changes: Any,
) -> Result:
    """A result; two of the same workload, size, model, stack, device and hardware share a place on the leaderboard.

    `reasons` are those of a result that is not valid.
    """
    shapes = {"kind": workload, "size": size}
    primary = "tflops" if workload == "matmul" else "tokens_per_s"
    workload_digest = digest([shapes, model])
    metrics = {primary: a_metric(primary, 100.0, (99.0, 101.0))} if metrics is None else metrics
    fields: dict[str, Any] = {
        "id": new_id(),
        "created_at": measured_at,
        "variant": VariantSummary(
            index=index,
            role=Role.SINGLE,
            label=" + ".join(stack) or "baseline",
            workload=shapes,
            model=None if workload == "matmul" else model,
            backend="torch",
            device=device,
            stack=tuple({"name": name} for name in stack),
            workload_digest=workload_digest,
            variant_digest=digest([workload_digest, stack, device]),
            primary_metric=primary,
        ),
        "verdict": Verdict(
            valid=valid,
            reasons=() if valid else reasons,
            warnings=warnings,
        ),
        "metrics": {
            name: metric.model_copy(update={"replicates": max(replicates, metric.replicates)})
            for name, metric in metrics.items()
        },
        "facts": facts or RunFacts(decode_loop="transformers"),
        "environment": an_environment(hardware, software=software),
        "seed": 0,
    }
    return Result.model_validate(fields | changes)


def an_environment(
    hardware: str = "1x Test CPU", host: str = "host-1", software: dict[str, str] | None = None
) -> Environment:
    """A machine of that class."""
    return Environment(
        hardware_class=hardware,
        host_id=host,
        cpu_model="Test CPU",
        cpu_cores=2,
        memory_bytes=2**34,
        os="Linux",
        software=software or {"torch": "2.13.0"},
    )


def an_outcome(result: Result, samples: dict[str, Samples] | None = None) -> Outcome:
    """The outcome of a variant that was measured."""
    return Outcome(
        index=result.variant.index, status=VariantStatus.SUCCEEDED, result=result, samples=samples or {}
    )


def a_failure(index: int = 0, reason: str = "There was no memory left.") -> Outcome:
    """The outcome of a variant that was not."""
    return Outcome(index=index, status=VariantStatus.FAILED, reason=reason)


def claimed(
    session: Session, worker: WorkerInfo | None = None, now: datetime | None = None, asked: str | None = None
) -> Lease:
    """The next job, which there must be, is taken for half a minute."""
    lease = leases.claim(session, worker or a_worker(), 30, now, asked=asked)
    assert lease is not None
    return lease


def planned(session: Session, *labels: str) -> Lease:
    """A job with these variants that a worker has begun."""
    jobs.submit(session, a_spec())
    lease = claimed(session)
    outcomes.plan(session, lease, a_plan(*labels))
    return lease


def enter(session: Session, *made: Result) -> None:
    """Results that are on the leaderboard, one after the other."""
    for result in made:
        results.add(session, result, {})
        standings.enter(session, result)


def entered(database: Database, *made: Result) -> None:
    """The same, each in a transaction of its own."""
    for result in made:
        with database.write() as session:
            enter(session, result)


def a_speed(value: float, interval: tuple[float, float] | None = None, **changes: Any) -> Result:
    """A result whose one metric is tokens per second."""
    return a_result({"tokens_per_s": a_metric("tokens_per_s", value, interval)}, **changes)


def a_sure_speed(value: float, **changes: Any) -> Result:
    """A speed that is known within 1%."""
    return a_speed(value, (0.99 * value, 1.01 * value), **changes)


def board_of(session: Session, **filters: Any) -> Board:
    """The only board."""
    (board,) = leaderboard.query(session, LeaderboardQuery(**filters)).boards
    return board


def rows_of(session: Session, **filters: Any) -> list[LeaderboardRow]:
    """The rows of all boards."""
    return [
        row for board in leaderboard.query(session, LeaderboardQuery(**filters)).boards for row in board.rows
    ]


def fill(url: str) -> None:
    """A job that has succeeded, with a result, samples and a file; a rule for its place, and a browser that is signed
    in."""
    with closing(Database(url)) as database, database.write() as session:
        jobs.submit(session, a_spec(), idempotency_key="key")
        lease = claimed(session)
        outcomes.plan(session, lease, a_plan("baseline"))
        file = Artifact(name="trace.json", media_type="application/json", size_bytes=2, data=b"{}")
        outcomes.save_outcome(session, lease, an_outcome(a_result(), {"tokens_per_s": ((1.0,),)}), [file])
        outcomes.printed(session, lease, Printed(index=0, text="A warning of a library."))
        outcomes.finish(session, lease, JobState.SUCCEEDED)
        (board,) = leaderboard.query(session, LeaderboardQuery()).boards
        rule = AlertRequest(result_id=board.rows[0].result_id, kind=AlertKind.CHANGE_POINT)
        alerts.create(session, rule, "somebody")
        gates.add(session, GateRequest.model_validate(GATES["worse"].document, strict=False), "somebody")
        key = keys.verify(session, keys.create(session, "a browser's", ["read"]))
        assert key is not None
        keys.sign_in(session, key.id, timedelta(hours=1))


def fill_devices(database: Database) -> None:
    """A device that enrolled, began a run and reported on it."""
    invitation = Claim(invited(database)).body
    with database.write() as session:
        device_id = device_identity.claim(session, ClaimRequest.model_validate(invitation)).answer.device_id
        request = DeviceRequest(
            device_id=device_id,
            key_version=1,
            boot_id="b" * 16,
            sequence=1,
            firmware_sha256="c" * 64,
            clock_synchronised=True,
            received_at=NOON,
        )
        edge_reports.add_model(session, ModelManifest.model_validate(manifest()))
        device = devices.enter(session, request)
        run = edge_reports.start_run(session, request, "a" * 64)
        sent = DeviceMessage.model_validate(message(report(1, run.id)))
        assert len(device_messages.take(session, request, device, sent).reports) == 1


MODEL, OTHER_MODEL = "a" * 64, "b" * 64
FIRMWARE = "f" * 64
BOARD = "esp32s3-n16r8"
NETWORK = {"family": "mobilenet_v2", "alpha": "0.35", "input": [96, 96, 3], "classes": 10}
WINDOW_US = 10_000_000


def a_device(session: Session, name: str | None = None, source: DeviceSource = DeviceSource.DEVICE) -> str:
    """Enrols a device and returns its id."""
    device = NewDevice(name=name, board=BOARD, source=source, firmware_sha256=FIRMWARE, secret=b"k" * 32)
    return devices.enrol(session, device, NOON)


def a_window(latency_us: int, watts: float | None = 0.5) -> dict[str, Any]:
    """About 10 s of inferences of that latency, at that power."""
    count = max(1, WINDOW_US // latency_us)
    total = count * latency_us
    return {"count": count, "total_us": total, "energy_uj": None if watts is None else round(total * watts)}


def a_report(
    median_us: int = 100_000,
    *,
    watts: float | None = 0.5,
    spread_us: int = 0,
    windows: int = 5,
    **changes: Any,
) -> DeviceReport:
    """A run whose windows have latencies from `median_us` up to `spread_us` more."""
    steps = max(windows - 1, 1)
    made = [a_window(median_us + spread_us * n // steps, watts) for n in range(windows)]
    count = sum(window["count"] for window in made)
    document: dict[str, Any] = signing_device.report("00c0ffee00c0ffee", 1) | {
        "run_id": new_id(),
        "model_sha256": MODEL,
        "board": BOARD,
        "firmware_sha256": FIRMWARE,
        "windows": made,
        "latency_us": {"count": count, "min": median_us, "p50": median_us, "p90": None, "p99": None},
        "power": {"source": "none" if watts is None else "ina226", "idle_uw": None},
        "golden": None,
        "started_us": 0,
    }
    return DeviceReport.model_validate(document | changes)


def stored(
    session: Session,
    device_id: str,
    report: DeviceReport,
    *reasons: Reason,
    flags: tuple[Any, ...] = (),
    minute: int = 0,
) -> str:
    """Stores a report as the service would that found these reasons, and returns its id."""
    request = DeviceRequest(
        device_id=device_id,
        key_version=1,
        boot_id=report.boot_id,
        sequence=report.sequence,
        firmware_sha256=report.firmware_sha256,
        clock_synchronised=True,
        received_at=NOON + timedelta(minutes=minute),
    )
    quarantined = any(reason.quarantines for reason in reasons)
    judged = JudgedReport(
        report=report,
        source=DeviceSource.SIMULATOR if Reason.SIMULATOR in reasons else DeviceSource.DEVICE,
        state=ReportState.QUARANTINED if quarantined else ReportState.ACCEPTED,
        ranked=not reasons,
        reasons=reasons,
        flags=flags,
    )
    answer = edge_reports.add_report(session, request, judged)
    assert answer.report_id is not None
    return answer.report_id


def a_manifest(sha256: str = MODEL, **network: Any) -> ModelManifest:
    changes = {"sha256": sha256, "network": NETWORK | network}
    return ModelManifest.model_validate(signing_device.manifest() | changes)


def known(session: Session, manifest: ModelManifest) -> None:
    """Enters a model."""
    edge_reports.add_model(session, manifest)


def a_classification(
    images_per_s: float,
    watts: float | None,
    *,
    backend: str = "torch",
    network: NetworkFacts | None = None,
    weight_hash: str | None = None,
    **changes: Any,
) -> Result:
    """A worker's result of an image classifier; without `watts` its energy was not measured."""
    metrics = {
        "images_per_s": a_metric("images_per_s", images_per_s, (images_per_s * 0.99, images_per_s * 1.01)),
        "power_w": a_metric("power_w", watts),
        "j_per_image": a_metric("j_per_image", watts and 0.5 * watts / images_per_s),
    }
    counts: dict[str, Any] = dict.fromkeys(
        ("looks", "changes", "requests", "window_s", "idle_w", "idle_s"), 9
    )
    energy = EnergyFacts(source="RAPL package", scope="the CPU alone", resolution_j=None, **counts)
    weights = WeightFacts(hash=weight_hash, hash_of="files") if weight_hash else None
    facts = RunFacts(network=network, weights=weights, energy=energy if watts else None)
    result = a_result(metrics, workload="classify", model="preset:mobilenet-v2", facts=facts, **changes)
    variant = result.variant.model_copy(
        update={
            "backend": backend,
            "primary_metric": "images_per_s",
            "workload": {"kind": "classify", "batch_size": 1, "image_size": None},
        }
    )
    return result.model_copy(update={"variant": variant})
