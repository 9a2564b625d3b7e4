"""Objects that all requests share, created once by `create_app`: of these the doorbell, by which workers are told of
jobs, and the feeds of live events, for which the database is polled once for each followed job."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import structlog
from fastapi import Depends, Request

from api.deliveries import Deliveries
from api.gate import Gate, KeyUses, RateLimiter
from api.metrics import Metrics
from api.settings import ServiceSettings
from optigpu.documents.views import EventView
from optigpu.store import events
from optigpu.store.database import Database
from optigpu.store.workers import broker_url, message
from optigpu.tracing import Tracing
from optigpu.vocabulary import DeviceKind, NotFoundError

if TYPE_CHECKING:
    from celery import Celery

REDIS_WAIT_S = 1.0
CLOSE_WAIT_S = 5.0
MOST_WAITING = 10_000
"""How many messages wait in memory at most; the sweepers of workers send what is dropped."""
logger = structlog.stdlib.get_logger("api.service")

Ring = tuple[str, DeviceKind]


class Doorbell:
    """Notifies workers through Redis, from a thread of its own: no answer waits for it. Without a broker it does
    nothing, because the embedded worker polls."""

    def __init__(self, redis_url: str | None) -> None:
        self._url = redis_url
        self._waiting: queue.Queue[Ring | None] = queue.Queue(MOST_WAITING)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def ring(self, job_id: str, device: DeviceKind) -> None:
        """Has a message sent soon. What cannot be sent is logged, and sent by a worker's sweeper later."""
        if self._url is None:
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name="doorbell", daemon=True)
                self._thread.start()
        with suppress(queue.Full):
            self._waiting.put_nowait((job_id, device))

    def ping(self) -> None:
        """Raises an error of the redis package when the broker does not answer."""
        if self._url is None:
            return
        import redis

        with redis.Redis.from_url(
            self._url, socket_connect_timeout=REDIS_WAIT_S, socket_timeout=REDIS_WAIT_S
        ) as client:
            client.ping()

    def close(self) -> None:
        """Sends what waits, for some seconds at most, and closes the connections to the broker."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join(CLOSE_WAIT_S)
        if "_celery" in self.__dict__:
            self._celery.close()

    def _send_all(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            closing = False
            with suppress(queue.Empty):
                while not closing:
                    following = self._waiting.get_nowait()
                    closing = following is None
                    if following is not None:
                        batch.append(following)
            self._send(batch)
            if closing:
                return

    def _send(self, batch: list[Ring]) -> None:
        """One connection for the whole batch, and one refusal ends it: a broker that is away takes no other either."""
        sent = 0
        try:
            with self._celery.producer_or_acquire() as producer:
                for job_id, device in batch:
                    told = message(job_id, device)
                    self._celery.send_task(**told, producer=producer, ignore_result=True, retry=False)
                    sent += 1
        except Exception as error:  # without its thread no later message would be sent
            logger.warning("ring_failed", jobs=len(batch) - sent, reason=str(error))

    @cached_property
    def _celery(self) -> "Celery":
        from celery import Celery

        assert self._url is not None
        celery = Celery("optigpu", broker=broker_url(self._url), set_as_current=False)
        celery.conf.update(
            broker_connection_timeout=REDIS_WAIT_S,
            broker_transport_options={
                "socket_connect_timeout": REDIS_WAIT_S,
                "socket_timeout": REDIS_WAIT_S,
                "max_retries": 0,
            },
            task_ignore_result=True,
        )
        return celery


POLL_S = 0.3
HEARTBEAT_S = 15.0
BATCH = 500
TAIL = 1000


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


@dataclass(frozen=True)
class Service:
    """The objects that all requests share."""

    settings: ServiceSettings
    database: Database
    doorbell: Doorbell
    gate: Gate
    limiter: RateLimiter
    device_limiter: RateLimiter
    feeds: Feeds
    key_uses: KeyUses
    deliveries: Deliveries
    metrics: Metrics
    tracing: Tracing


async def service_of(request: Request) -> Service:
    """The service that a request came to. It waits for nothing, and so needs no thread."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(service_of)]
