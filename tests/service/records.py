"""Small, valid things to store: a spec, a worker, a result, an outcome; and what many tests do with them."""

from datetime import UTC, datetime
from typing import Any

from optigpu.documents.events import PlannedVariant
from optigpu.documents.facts import RunFacts
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
from optigpu.store import jobs, leaderboard, leases, outcomes, results, standings
from optigpu.store.database import Session
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.leases import Lease
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import METRICS, DeviceKind, Role, VariantStatus, new_id

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


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


def a_speed(value: float, interval: tuple[float, float] | None = None, **changes: Any) -> Result:
    """A result whose one metric is tokens per second."""
    return a_result({"tokens_per_s": a_metric("tokens_per_s", value, interval)}, **changes)


def board_of(session: Session, **filters: Any) -> Board:
    """The only board."""
    (board,) = leaderboard.query(session, LeaderboardQuery(**filters)).boards
    return board


def rows_of(session: Session, **filters: Any) -> list[LeaderboardRow]:
    """The rows of all boards."""
    return [
        row for board in leaderboard.query(session, LeaderboardQuery(**filters)).boards for row in board.rows
    ]
