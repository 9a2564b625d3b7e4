"""Jobs that are posted: those that wait are stored together, in one transaction."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from api.callers import Caller
from api.problems import ProblemError
from api.together import Together
from optigpu.documents.administration import AuditAction
from optigpu.job.spec import JobSpec
from optigpu.store import audit, jobs, traces
from optigpu.store.database import Database
from optigpu.store.jobs import Post, Submitted
from optigpu.store.keys import Scope
from optigpu.store.prospects import KnownProspects
from optigpu.vocabulary import ConflictError

SpecOf = Callable[[bytes], JobSpec]
"""Reads a body (api.bodies.posted_spec)."""


class Posted(NamedTuple):
    """A job, or the body of a request that posts one; who sends it; the address of its span, if that is recorded."""

    job: bytes | JobSpec
    who: Caller
    idempotency_key: str | None
    span: str | None

    def read(self, spec_of: SpecOf) -> Post:
        """The job. Raises ProblemError for one that is invalid, or that the caller may not post."""
        spec = self.job if isinstance(self.job, JobSpec) else spec_of(self.job)
        if spec.priority > 0 and not self.who.may(Scope.ADMIN):
            raise ProblemError(
                403, "A priority above 0 needs a key with the scope admin; leave priority out."
            )
        # Idempotency keys of different callers are kept apart.
        key = None if self.idempotency_key is None else f"{self.who.id}:{self.idempotency_key}"
        return Post(spec, owner=self.who.id, idempotency_key=key)


Read = tuple[Posted, Post]


class Posts:
    """Stores jobs, for one process of the service."""

    def __init__(self, database: Database, lease_s: float, spec_of: SpecOf) -> None:
        self._database = database
        self._spec_of = spec_of
        self._lease_s = lease_s
        self._prospects = KnownProspects()
        self._together = Together[Posted, Submitted](self._submitted, "posts")

    async def submit(self, posted: Posted) -> Submitted:
        """The job, when it is committed. Raises ProblemError, ConflictError, StoreError."""
        return await self._together.ask(posted)

    def close(self) -> None:
        """Ends the thread that stores."""
        self._together.close()

    def _submitted(self, posted: Sequence[Posted]) -> list[Submitted | Exception]:
        read = [self._read(each) for each in posted]
        valid = [(each, post) for each, post in zip(posted, read, strict=True) if isinstance(post, Post)]
        stored = iter(self._each(valid))
        return [next(stored) if isinstance(post, Post) else post for post in read]

    def _each(self, read: Sequence[Read]) -> Sequence[Submitted | Exception]:
        try:
            return self._stored(read) if read else []
        except Exception as error:
            if len(read) == 1:
                return [error]
        # What one of them has is no other's fault.
        return [answer for each in read for answer in self._each([each])]

    def _stored(self, read: Sequence[Read]) -> list[Submitted | ConflictError]:
        with self._database.write() as session:
            found = jobs.submit_all(
                session, [post for _, post in read], lease_s=self._lease_s, known=self._prospects
            )
            made = [
                (each, answer)
                for (each, _), answer in zip(read, found, strict=True)
                if isinstance(answer, Submitted) and answer.created
            ]
            for each, answer in made:
                audit.write(
                    session,
                    each.who.actor,
                    AuditAction.JOB_SUBMITTED,
                    answer.job.id,
                    at=answer.job.created_at,
                )
                if each.span:
                    traces.keep(session, answer.job.id, each.span)
        return found

    def _read(self, posted: Posted) -> Post | ProblemError:
        try:
            return posted.read(self._spec_of)
        except ProblemError as error:
            return error
