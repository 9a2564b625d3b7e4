"""A job that a worker holds: what is read and written of it while it is measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from optigpu.documents.events import Noted
from optigpu.documents.result import Attribution, Outcome
from optigpu.documents.views import JobView, ProgressView
from optigpu.store import jobs, leases, outcomes
from optigpu.store.artifacts import Artifact
from optigpu.store.leases import Lease
from optigpu.vocabulary import FailureKind, JobState
from worker.context import WorkerContext


class HeldJob(Protocol):
    """The calls of a worker for the job of its lease: in the database, or by HTTP where there is none.

    Each raises StoreUnavailableError if it may be made again, and LeaseLostError if another worker holds the job.
    """

    @property
    def lease(self) -> Lease: ...

    def heartbeat(self, progress: ProgressView | None) -> bool:
        """Extends the lease; returns whether a cancel was requested."""
        ...

    def note(self, event: Noted) -> None: ...

    def save(self, outcome: Outcome, files: Sequence[Artifact]) -> None: ...

    def earlier(self) -> dict[int, Outcome]:
        """The outcomes that earlier attempts have left, by their variants' indexes."""
        ...

    def view(self) -> JobView: ...

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None) -> None: ...

    def fail(self, kind: FailureKind, error: str) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True)
class StoredJob:
    """A held job in the database."""

    context: WorkerContext
    lease: Lease

    def heartbeat(self, progress: ProgressView | None) -> bool:
        lease_s = self.context.settings.lease_s
        return self.context.write(lambda session: leases.heartbeat(session, self.lease, lease_s, progress))

    def note(self, event: Noted) -> None:
        self.context.write(lambda session: outcomes.note(session, self.lease, event))

    def save(self, outcome: Outcome, files: Sequence[Artifact]) -> None:
        self.context.write(lambda session: outcomes.save_outcome(session, self.lease, outcome, files))

    def earlier(self) -> dict[int, Outcome]:
        return self.context.read(lambda session: outcomes.earlier(session, self.lease))

    def view(self) -> JobView:
        return self.context.read(lambda session: jobs.get(session, self.lease.job_id))

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None) -> None:
        self.context.write(lambda session: outcomes.finish(session, self.lease, state, reason, attribution))

    def fail(self, kind: FailureKind, error: str) -> None:
        self.context.write(lambda session: leases.fail(session, self.lease, kind, error))

    def release(self) -> None:
        self.context.write(lambda session: leases.release(session, self.lease))
