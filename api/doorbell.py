"""Notifies workers through Redis that a job is queued. The message holds no job: workers read the database."""

import threading
from functools import cached_property
from typing import TYPE_CHECKING

import structlog

from optigpu.store.doorbell import LOOK_TASK, broker_url, queue_for
from optigpu.vocabulary import DeviceKind

if TYPE_CHECKING:
    from celery import Celery

REDIS_WAIT_S = 1.0
logger = structlog.stdlib.get_logger("api.doorbell")


class Doorbell:
    """Notifies workers through Redis. Without a broker it does nothing, because the embedded worker polls."""

    def __init__(self, redis_url: str | None) -> None:
        self._url = redis_url
        self._making = threading.Lock()

    def ring(self, device: DeviceKind) -> None:
        """Sends one notification, in at most about two seconds. A failure is logged: the sweeper sends another one."""
        if self._url is None:
            return
        try:
            with self._making:
                celery = self._celery
            celery.send_task(LOOK_TASK, queue=queue_for(device), ignore_result=True, retry=False)
        except Exception as error:
            logger.warning("ring_failed", queue=queue_for(device), reason=str(error))

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
        """Closes the connections to the broker."""
        if "_celery" in self.__dict__:
            self._celery.close()

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
