"""Sends workers a message for each queued job, through Redis, from a thread of its own: no answer waits for it."""

import queue
import threading
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import structlog

from optigpu.store.workers import broker_url, message
from optigpu.vocabulary import DeviceKind

if TYPE_CHECKING:
    from celery import Celery

REDIS_WAIT_S = 1.0
CLOSE_WAIT_S = 5.0
MOST_WAITING = 10_000
"""How many messages wait in memory at most; the sweepers of workers send what is dropped."""
logger = structlog.stdlib.get_logger("api.doorbell")

Ring = tuple[str, DeviceKind]


class Doorbell:
    """Notifies workers through Redis. Without a broker it does nothing, because the embedded worker polls."""

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
