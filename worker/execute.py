"""Claims the next job, measures it and records how it ended, in embedded and in service mode alike."""

import time

import structlog

from optigpu.run import Report, run
from optigpu.store import leases
from optigpu.store.errors import StoreUnavailableError
from optigpu.store.leases import Lease
from optigpu.vocabulary import AttemptEndedError, JobState, LeaseLostError, OptiGPUError, VariantStatus
from worker.context import WorkerContext
from worker.heartbeat import Heartbeat, Interruption
from worker.recorder import Recorder

log = structlog.stdlib.get_logger(__name__)


def execute_next(context: WorkerContext) -> bool:
    """Claims and runs the next job that this worker can run; False if there was none.

    Never raises for what a job, a database that is away or another worker does: that is recorded, or logged.
    """
    if context.stopping.asked:
        return False
    before = time.monotonic()
    lease = _claim(context)
    if lease is None:
        return False
    context.job_id = lease.job_id
    heartbeat = Heartbeat(context, lease, claimed_at=before)
    with structlog.contextvars.bound_contextvars(job_id=lease.job_id, attempt=lease.attempt), heartbeat:
        log.info("job.claimed", fencing=lease.fencing)
        _see_to_its_end(lease, Recorder(context, lease, heartbeat))
    context.job_id = None
    return True


def _claim(context: WorkerContext) -> Lease | None:
    try:
        return context.write(lambda session: leases.claim(session, context.info, context.settings.lease_s))
    except StoreUnavailableError as error:
        log.warning("database.away", reason=str(error))
        return None


def _see_to_its_end(lease: Lease, recorder: Recorder) -> None:
    """Measures and records. What cannot be recorded any more is left to the next attempt, after the lease."""
    try:
        _measure(lease, recorder)
    except LeaseLostError as error:
        log.warning("job.lease_lost", reason=str(error))
    except StoreUnavailableError as error:
        log.error("job.abandoned", reason=str(error))
    except Exception:
        log.exception("job.abandoned")


def _measure(lease: Lease, recorder: Recorder) -> None:
    try:
        done = recorder.earlier() if lease.done else {}
        report = run(lease.spec, recorder, cancelled=recorder.cancelled, done=done)
        _end(recorder, report)
    except AttemptEndedError:
        _interrupted(recorder)
    except (LeaseLostError, StoreUnavailableError):
        raise
    except OptiGPUError as error:
        recorder.finish(JobState.FAILED, str(error))
    except Exception as error:
        log.exception("job.broken")
        recorder.finish(JobState.FAILED, f"The worker failed ({type(error).__name__}); its log says where.")


def _interrupted(recorder: Recorder) -> None:
    match recorder.interruption():
        case Interruption.CANCELLED:
            recorder.finish(JobState.CANCELLED, Interruption.CANCELLED.value)
        case Interruption.NOT_EXTENDED:
            recorder.finish(JobState.FAILED, Interruption.NOT_EXTENDED.value)
        case Interruption.STOPPING:
            recorder.release()
        case _:
            raise LeaseLostError(Interruption.LEASE_LOST.value)


def _end(recorder: Recorder, report: Report) -> None:
    """A job in which something was measured has succeeded, unless it was cancelled: each variant that was not says why.

    A job that stopped before its end says so as well.
    """
    variants = recorder.stored().variants
    if report.cancelled:
        recorder.finish(JobState.CANCELLED, report.stopped, report.attribution)
    elif any(variant.status is VariantStatus.SUCCEEDED for variant in variants):
        recorder.finish(JobState.SUCCEEDED, report.stopped, report.attribution)
    else:
        recorder.finish(JobState.FAILED, f"Nothing was measured: {variants[0].reason}", report.attribution)
