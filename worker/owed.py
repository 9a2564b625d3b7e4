"""What a worker could not say while the database was away: that its attempt ended because of that."""

from contextlib import suppress

from optigpu.store import leases
from optigpu.vocabulary import FailureKind, LeaseLostError
from worker.context import WorkerContext

SENTENCE = "The worker could not reach the database for longer than its lease."


def settle(context: WorkerContext) -> None:
    """Says it, unless another worker has taken the job back meanwhile. Raises StoreUnavailableError."""
    lease = context.owed
    if lease is None:
        return
    with suppress(LeaseLostError):
        context.write(lambda session: leases.fail(session, lease, FailureKind.DATABASE_AWAY, SENTENCE))
    context.owed = None
