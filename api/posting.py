"""Posts and cancels jobs for a caller, however the request came: as JSON, by a form, or from a program that talks."""

from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from api.gate import Caller
from api.inputs import posted_job
from api.problems import ProblemError
from api.service import Service
from optigpu.documents.administration import AuditAction
from optigpu.documents.views import JobView
from optigpu.job.spec import JobSpec
from optigpu.store import audit, jobs, queue
from optigpu.store.jobs import Submitted
from optigpu.store.keys import Scope
from optigpu.vocabulary import JobState


@dataclass(frozen=True)
class Posting:
    """What one caller does with jobs. `span` is the address of the request's span, if it is traced."""

    service: Service
    who: Caller
    span: str | None = None

    async def submit(self, job: bytes | JobSpec, idempotency_key: str | None = None) -> JobView:
        """Stores the job, or that of a request's body, and rings for a worker. Raises ProblemError for one that is
        invalid or that the caller may not post, ConflictError for an idempotency key of another job."""
        submitted = await run_in_threadpool(self._submit, job, idempotency_key)
        if submitted.created:
            self._ring(submitted.job)
        return submitted.job

    def _submit(self, job: bytes | JobSpec, idempotency_key: str | None) -> Submitted:
        spec = job if isinstance(job, JobSpec) else posted_job(job).spec
        if spec.priority > 0 and not self.who.may(Scope.ADMIN):
            raise ProblemError(
                403, "A priority above 0 needs a key with the scope admin; leave priority out."
            )
        # Idempotency keys of different callers are kept apart.
        key = None if idempotency_key is None else f"{self.who.id}:{idempotency_key}"
        lease_s = self.service.settings.lease_s
        with self.service.database.write() as session:
            submitted = jobs.submit(session, spec, owner=self.who.id, idempotency_key=key, lease_s=lease_s)
            if submitted.created:
                posted = submitted.job
                audit.write(
                    session, self.who.actor, AuditAction.JOB_SUBMITTED, posted.id, at=posted.created_at
                )
                if self.span:
                    queue.keep(session, posted.id, self.span)
        return submitted

    def retry(self, job_id: str) -> JobView:
        """Puts a parked job back and rings for a worker. Raises NotFoundError, ConflictError."""
        with self.service.database.write() as session:
            before = jobs.get(session, job_id).state
            job = jobs.retry(session, job_id, lease_s=self.service.settings.lease_s)
            if job.state is not before:
                audit.write(session, self.who.actor, AuditAction.JOB_RETRIED, job_id)
        self._ring(job)
        return job

    def cancel(self, job_id: str) -> JobView:
        """Cancels the job; one that has ended stays as it is. Raises NotFoundError."""
        with self.service.database.write() as session:
            before = jobs.get(session, job_id).cancel_requested_at
            job = jobs.request_cancel(session, job_id, lease_s=self.service.settings.lease_s)
            if job.cancel_requested_at != before:
                audit.write(session, self.who.actor, AuditAction.JOB_CANCELLED, job_id)
        return job

    def _ring(self, job: JobView) -> None:
        """A job for a scheduler is its launcher's, which looks for itself."""
        if job.state is JobState.QUEUED and job.spec.get("via") is None:
            self.service.doorbell.ring(job.id, job.device)
