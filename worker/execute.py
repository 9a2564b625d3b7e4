"""Claim the next job, measure it, record how it ended: the one function behind both modes."""

import time

import structlog

from optigpu.run import Report, run
from optigpu.store import jobs
from optigpu.store.errors import StoreUnavailableError
from optigpu.vocabulary import CancelledError, JobState, LeaseLostError, OptiGPUError, VariantStatus
from worker.heartbeat import Heartbeat, Interruption
from worker.recorder import Recorder
from worker.station import Station

log = structlog.stdlib.get_logger(__name__)


def execute_next(station: Station) -> bool:
    """Claims the next job that this worker can run and sees it to its end; False when there was none.

    Never raises for what a job, a database that is away or another worker does: that is recorded, or logged.
    """
    if station.stopping.asked:
        return False
    before = time.monotonic()
    claim = _claim(station)
    if claim is None:
        return False
    station.job_id = claim.job_id
    heartbeat = Heartbeat(station, claim, claimed_at=before)
    with structlog.contextvars.bound_contextvars(job_id=claim.job_id, attempt=claim.attempt), heartbeat:
        log.info("job.claimed", fencing=claim.fencing)
        _see_to_its_end(claim, Recorder(station, claim, heartbeat))
    station.job_id = None
    return True


def _claim(station: Station) -> jobs.Claim | None:
    try:
        return station.write(jobs.claim, station.info, station.settings.lease_s)
    except StoreUnavailableError as error:
        log.warning("database.away", reason=str(error))
        return None


def _see_to_its_end(claim: jobs.Claim, recorder: Recorder) -> None:
    """Measures and records. What cannot be recorded any more is left to the next attempt, after the lease."""
    try:
        _measure(claim, recorder)
    except LeaseLostError as error:
        log.warning("job.lease_lost", reason=str(error))
    except StoreUnavailableError as error:
        log.error("job.abandoned", reason=str(error))
    except Exception:
        log.exception("job.abandoned")


def _measure(claim: jobs.Claim, recorder: Recorder) -> None:
    try:
        done = recorder.earlier() if claim.done else {}
        report = run(claim.spec, recorder, cancelled=recorder.interruption, done=done)
        _end(recorder, report)
    except CancelledError:
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
        case Interruption.STOPPING:
            recorder.release()
        case _:
            raise LeaseLostError(Interruption.LEASE_LOST.value)


def _end(recorder: Recorder, report: Report) -> None:
    """A job in which something was measured has succeeded: each variant that was not says why."""
    variants = recorder.stored().variants
    if any(variant.status is VariantStatus.SUCCEEDED for variant in variants):
        recorder.finish(JobState.SUCCEEDED, None, report.attribution)
    else:
        recorder.finish(JobState.FAILED, f"Nothing was measured: {variants[0].reason}", report.attribution)
