"""The events of jobs, live: one poll of the database for each job that somebody follows, however many they are."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import structlog

from optigpu.documents.views import EventView
from optigpu.store import events
from optigpu.store.database import Database
from optigpu.vocabulary import JobState

POLL_S = 0.3
HEARTBEAT_S = 15.0
BATCH = 500
TAIL = 1000
logger = structlog.stdlib.get_logger("api.feeds")


@dataclass(frozen=True)
class Batch:
    """Events in their order, and whether the job can have no more of them."""

    events: tuple[EventView, ...]
    complete: bool


class Feed:
    """The newest events of one job, for all who follow it. `known` is the last sequence that was read."""

    def __init__(self) -> None:
        self.followers = 0
        self.known = 0
        self.over = False
        self.changed = asyncio.Event()
        self._tail: deque[EventView] = deque(maxlen=TAIL)

    def extend(self, batch: Batch) -> None:
        """Takes a batch in and wakes everybody who waits."""
        self._tail.extend(batch.events)
        self.known = batch.events[-1].sequence if batch.events else self.known
        if batch.events or batch.complete:
            self.over = batch.complete
            self._wake()

    def end(self) -> None:
        """No more events will come through this feed."""
        self.over = True
        self._wake()

    def since(self, position: int) -> tuple[EventView, ...] | None:
        """What came after a sequence; None when that lies before the tail."""
        first = self.known - len(self._tail) + 1
        if position + 1 < first:
            return None
        return tuple(islice(self._tail, position + 1 - first, None))

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
            found = tuple(events.after(session, job_id, position, BATCH))
        return Batch(found, complete=any(map(_is_last, found)))

    async def follow(self, job_id: str, after: int) -> AsyncIterator[EventView | None]:
        """Each event after a sequence until the job's last one; None when nothing happened for HEARTBEAT_S."""
        with self._joined(job_id) as feed:
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
    def _joined(self, job_id: str) -> Iterator[Feed]:
        feed = self._feeds.get(job_id)
        if feed is None or feed.over:
            feed = self._feeds[job_id] = Feed()
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
            except Exception as error:  # whoever follows would wait for ever if the poll ended
                logger.warning("events_not_read", job_id=job_id, reason=str(error))
                batch = Batch((), complete=False)
            feed.extend(batch)
            await asyncio.sleep(0 if len(batch.events) == BATCH else POLL_S)


def _is_last(event: EventView) -> bool:
    """A job's last event says that its state is final."""
    return event.kind == "state" and JobState(event.data["state"]).is_final


async def _within(seconds: float, event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
