"""Claims the next job, measures it and records how it ended, in embedded and in service mode alike."""

import time

import structlog

from optigpu.documents.versions import why_none_ranks
from optigpu.measure import Report, run
from optigpu.store import leases
from optigpu.store.database import StoreUnavailableError
from optigpu.store.leases import Lease
from optigpu.vocabulary import (
    AttemptEndedError,
    CancelledError,
    FailureKind,
    JobState,
    LeaseLostError,
    OptiGPUError,
    UnsupportedError,
    VariantStatus,
)
from optigpu.workloads.kernel import code_refusal
from worker.context import DeviceContext, WorkerContext
from worker.heartbeat import Heartbeat, Interruption, StoredJob
from worker.recorder import AttemptTrace, Recorder, parent_of

log = structlog.stdlib.get_logger(__name__)


def execute_next(context: WorkerContext, asked: str | None = None) -> bool:
    """Claims and runs the job whose turn it is of those that this worker can run; False if there was none. `asked` is
    the job that a message names.

    Never raises for what a job, a database that is away or another worker does: that is recorded, or logged.
    """
    if context.stopping.asked or not _device_works(context):
        return False
    before = time.monotonic()
    lease = _claim(context, asked)
    if lease is None:
        return False
    context.job_id = lease.job_id
    job = StoredJob(context, lease)
    heartbeat = Heartbeat(job, context.settings.lease_s, claimed_at=before)
    trace = AttemptTrace(context.tracing, lease, parent_of(context, lease.job_id))
    recorder = Recorder(job, heartbeat, context.stopping, trace)
    with structlog.contextvars.bound_contextvars(job_id=lease.job_id, attempt=lease.attempt), heartbeat:
        log.info("job.claimed", fencing=lease.fencing, asked=asked)
        _see_to_its_end(context, lease, recorder)
    recorder.trace.end()
    context.job_id, context.in_doubt = None, recorder.saw_failure
    return True


def _device_works(context: DeviceContext) -> bool:
    """After a failure the device proves itself again, since one that is gone would fail every other job as well.

    If it cannot, the worker is told to stop, and `lost` says why.
    """
    if not context.in_doubt:
        return True
    try:
        context.prove_device()
    except CancelledError:
        return False
    except UnsupportedError as error:
        log.error("device.lost", reason=str(error))
        context.lost = str(error)
        context.stopping.ask()
        return False
    context.in_doubt = False
    return True


def _claim(context: WorkerContext, asked: str | None) -> Lease | None:
    lease_s = context.settings.lease_s
    try:
        return context.write(lambda session: leases.claim(session, context.info, lease_s, asked=asked))
    except StoreUnavailableError as error:
        log.warning("database.away", reason=str(error))
        return None


def _see_to_its_end(context: WorkerContext, lease: Lease, recorder: Recorder) -> None:
    """Measures and records. What cannot be recorded any more is left to the next attempt, after the lease."""
    try:
        measure(context, lease, recorder)
    except LeaseLostError as error:
        log.warning("job.lease_lost", reason=str(error))
        context.owed = lease if recorder.interruption() is Interruption.DATABASE_AWAY else None
    except StoreUnavailableError as error:
        log.error("job.abandoned", reason=str(error))
        context.owed = lease
    except Exception:
        log.exception("job.abandoned")


def measure(context: DeviceContext, lease: Lease, recorder: Recorder) -> None:
    """Measures the job and reports its end. Raises LeaseLostError and StoreUnavailableError if that cannot be done."""
    try:
        if refusal := code_refusal(lease.spec.workload):
            raise UnsupportedError(refusal)
        done = recorder.earlier() if lease.done else {}
        report = run(lease.spec, recorder, cancelled=recorder.cancelled, done=done)
        _end(context, recorder, report)
    except AttemptEndedError:
        _interrupted(recorder)
    except (LeaseLostError, StoreUnavailableError):
        raise
    except OptiGPUError as error:
        recorder.fail(FailureKind.REFUSED, str(error))
    except Exception as error:
        log.exception("job.broken")
        recorder.fail(FailureKind.BROKEN, f"The worker failed ({type(error).__name__}); its log says where.")


def _interrupted(recorder: Recorder) -> None:
    match recorder.interruption():
        case Interruption.CANCELLED:
            recorder.finish(JobState.CANCELLED, Interruption.CANCELLED.value)
        case Interruption.NOT_EXTENDED:
            recorder.fail(FailureKind.BROKEN, Interruption.NOT_EXTENDED.value)
        case Interruption.STOPPING | Interruption.ALLOCATION_ENDED:
            recorder.release()
        case Interruption.DATABASE_AWAY:
            raise LeaseLostError(Interruption.DATABASE_AWAY.value)
        case _:
            raise LeaseLostError(Interruption.LEASE_LOST.value)


def _end(context: DeviceContext, recorder: Recorder, report: Report) -> None:
    """A job in which something was measured has succeeded, unless it was cancelled: each variant that was not says why.

    A job that stopped before its end says so as well, and one in which no result can be ranked. One whose allocation
    ended before anything was measured is tried again.
    """
    variants = recorder.stored().variants
    unallocated = report.stopped is not None and report.stopped.startswith(Interruption.ALLOCATION_ENDED)
    measured = any(variant.status is VariantStatus.SUCCEEDED for variant in variants)
    if report.cancelled and not unallocated:
        recorder.finish(JobState.CANCELLED, report.stopped, report.attribution)
    elif unallocated and not measured:
        ended = f"{Interruption.ALLOCATION_ENDED.value} Nothing was measured by then."
        recorder.fail(FailureKind.ALLOCATION_ENDED, ended)
    elif measured:
        reasons = report.stopped, why_none_ranks(report.document()["results"])
        recorder.finish(JobState.SUCCEEDED, " ".join(filter(None, reasons)) or None, report.attribution)
    elif recorder.saw_host_memory_end:
        recorder.fail(FailureKind.OUT_OF_MEMORY, f"The host had no memory left: {variants[0].reason}")
    elif any(variant.status is VariantStatus.FAILED for variant in variants) and _has_lost_its_device(
        context
    ):
        recorder.fail(FailureKind.DEVICE_LOST, f"The worker's device stopped working: {context.lost}")
    else:
        recorder.finish(JobState.FAILED, f"Nothing was measured: {variants[0].reason}", report.attribution)


def _has_lost_its_device(context: DeviceContext) -> bool:
    """Whether the job failed because of the device: then another worker measures it."""
    context.in_doubt = True
    _device_works(context)
    return context.lost is not None
