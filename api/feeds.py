"""Live events of jobs. The database is polled once for each followed job, however many clients follow it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from optigpu.documents.views import EventView
from optigpu.store import events
from optigpu.store.database import Database
from optigpu.vocabulary import NotFoundError

POLL_S = 0.3
HEARTBEAT_S = 15.0
BATCH = 500
TAIL = 1000
logger = structlog.stdlib.get_logger("api.feeds")


@dataclass(frozen=True)
class Batch:
    """Events in order, and whether the job has ended, so that no more will follow."""

    events: tuple[EventView, ...]
    complete: bool


class Feed:
    """The newest events of one job, for all of its followers.

    `known` is the last sequence that was read. The feed holds every event after the sequence `start`, and none before.
    """

    def __init__(self, start: int) -> None:
        self.followers = 0
        self.start = self.known = start
        self.over = False
        self.changed = asyncio.Event()
        self._tail: deque[EventView] = deque(maxlen=TAIL)

    def extend(self, batch: Batch) -> None:
        """Adds a batch and wakes the followers."""
        for event in batch.events:
            if len(self._tail) == self._tail.maxlen:
                self.start = self._tail[0].sequence
            self._tail.append(event)
            self.known = event.sequence
        if batch.events or batch.complete:
            self.over = batch.complete
            self._wake()

    def end(self) -> None:
        """No more events will come through this feed."""
        self.over = True
        self._wake()

    def since(self, position: int) -> tuple[EventView, ...] | None:
        """The events after a sequence; None if the feed does not hold all of them."""
        if position < self.start:
            return None
        return tuple(event for event in self._tail if event.sequence > position)

    def _wake(self) -> None:
        waiting, self.changed = self.changed, asyncio.Event()
        waiting.set()


class Feeds:
    """All feeds of the process. `stopping` is asked with every poll; once true, all streams end."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._feeds: dict[str, Feed] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self.stopping: Callable[[], bool] = lambda: False

    def read(self, job_id: str, position: int) -> Batch:
        """The next events after a sequence, in a session of their own."""
        with self._database.read() as session:
            head = events.head(session, job_id)
            found = tuple(events.after(session, job_id, position, BATCH)) if head.sequence > position else ()
        return Batch(found, complete=head.ended and len(found) < BATCH)

    async def follow(self, job_id: str, after: int) -> AsyncIterator[EventView | None]:
        """Each event after a sequence until the job's last one; None when nothing happened for HEARTBEAT_S.

        `after` must not be larger than the sequence of the job's newest event.
        """
        with self._joined(job_id, after) as feed:
            position = after
            while True:
                changed, over = feed.changed, feed.over
                batch = feed.since(position)
                if batch is None:
                    batch = (await asyncio.to_thread(self.read, job_id, position)).events
                for event in batch:
                    yield event
                    position = event.sequence
                if not batch and over:
                    return
                if not batch and not await _within(HEARTBEAT_S, changed):
                    yield None

    @contextmanager
    def _joined(self, job_id: str, after: int) -> Iterator[Feed]:
        feed = self._feeds.get(job_id)
        if feed is None or feed.over:
            feed = self._feeds[job_id] = Feed(after)
            self._polls[job_id] = asyncio.create_task(self._poll(job_id, feed))
        feed.followers += 1
        try:
            yield feed
        finally:
            feed.followers -= 1
            if not feed.followers and self._feeds.get(job_id) is feed:
                del self._feeds[job_id]
                self._polls.pop(job_id).cancel()

    async def _poll(self, job_id: str, feed: Feed) -> None:
        while not feed.over:
            if self.stopping():
                feed.end()
                return
            try:
                batch = await asyncio.to_thread(self.read, job_id, feed.known)
            except NotFoundError:  # the job was removed
                feed.end()
                return
            except Exception as error:  # the followers would wait for ever if the poll ended
                logger.warning("events_not_read", job_id=job_id, reason=str(error))
                batch = Batch((), complete=False)
            feed.extend(batch)
            await asyncio.sleep(0 if len(batch.events) == BATCH else POLL_S)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
