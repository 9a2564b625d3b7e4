"""Posts and cancels jobs for a caller, however the request came: as JSON, by a form, or from a program that talks."""

from dataclasses import dataclass

from api.callers import Caller
from api.problems import ProblemError
from api.service import Service
from optigpu.documents.administration import AuditAction
from optigpu.documents.views import JobView
from optigpu.job.spec import JobSpec
from optigpu.store import audit, jobs, traces
from optigpu.store.keys import Scope
from optigpu.vocabulary import JobState


@dataclass(frozen=True)
class Posting:
    """What one caller does with jobs. `span` is the address of the request's span, if it is traced."""

    service: Service
    who: Caller
    span: str | None = None

    def submit(self, spec: JobSpec, idempotency_key: str | None = None) -> JobView:
        """Stores the job and rings for a worker. Raises ProblemError 403 for a priority that the caller may not give,
        ConflictError for an idempotency key of another job."""
        service, who = self.service, self.who
        if spec.priority > 0 and not who.may(Scope.ADMIN):
            raise ProblemError(
                403, "A priority above 0 needs a key with the scope admin; leave priority out."
            )
        with service.database.write() as session:
            submitted = jobs.submit(
                session,
                spec,
                owner=who.id,
                idempotency_key=None if idempotency_key is None else f"{who.id}:{idempotency_key}",
                lease_s=service.settings.lease_s,
                known=service.prospects,
            )
            if submitted.created:
                audit.write(session, who.actor, AuditAction.JOB_SUBMITTED, submitted.job.id)
            if submitted.created and self.span:
                traces.keep(session, submitted.job.id, self.span)
        if submitted.created and submitted.job.state is JobState.QUEUED and spec.via is None:
            service.doorbell.ring(submitted.job.id, spec.device)
        return submitted.job

    def retry(self, job_id: str) -> JobView:
        """Puts a parked job back and rings for a worker. Raises NotFoundError, ConflictError."""
        with self.service.database.write() as session:
            before = jobs.get(session, job_id).state
            job = jobs.retry(session, job_id, lease_s=self.service.settings.lease_s)
            if job.state is not before:
                audit.write(session, self.who.actor, AuditAction.JOB_RETRIED, job_id)
        if job.state is JobState.QUEUED and job.spec.get("via") is None:
            self.service.doorbell.ring(job.id, job.device)
        return job

    def cancel(self, job_id: str) -> JobView:
        """Cancels the job; one that has ended stays as it is. Raises NotFoundError."""
        with self.service.database.write() as session:
            before = jobs.get(session, job_id).cancel_requested_at
            job = jobs.request_cancel(session, job_id, lease_s=self.service.settings.lease_s)
            if job.cancel_requested_at != before:
                audit.write(session, self.who.actor, AuditAction.JOB_CANCELLED, job_id)
        return job
