"""Service mode: a Celery worker that looks for work when the doorbell rings."""

import os
import signal

import celery
import structlog
from celery import signals
from kombu.exceptions import OperationalError

from optigpu.store.doorbell import LOOK_TASK, broker_url, queue_for
from worker.context import WorkerContext
from worker.execute import execute_next
from worker.sweeper import Sweeper

log = structlog.stdlib.get_logger(__name__)

CONFIGURATION: dict[str, object] = {
    # A message holds no job, so it is acknowledged at once; the sweeper replaces one that is lost with a worker.
    "task_acks_late": False,
    "task_ignore_result": True,
    "task_serializer": "json",
    "accept_content": ["json"],
    # A busy worker leaves the next ring to an idle one.
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    # It concerns tasks that are acknowledged late, of which there are none; unset, Celery warns of it.
    "worker_cancel_long_running_tasks_on_connection_loss": True,
    "worker_enable_remote_control": False,
    "worker_hijack_root_logger": False,
    "worker_redirect_stdouts": False,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # The sender does not wait for a broker that is down: the next sweep tries again.
    "broker_transport_options": {"socket_connect_timeout": 5, "socket_keepalive": True, "max_retries": 1},
}


def serve(context: WorkerContext, redis_url: str) -> None:
    """Looks for a job at each message until the process is asked to stop."""
    app = celery.Celery("optigpu", broker=broker_url(redis_url))
    app.conf.update(CONFIGURATION)
    queue = queue_for(context.info.device)

    @app.task(name=LOOK_TASK)
    def look() -> None:
        while execute_next(context):
            pass
        if context.lost is not None:
            os.kill(os.getpid(), signal.SIGTERM)  # what makes Celery stop: a task cannot tell it to

    @signals.worker_shutting_down.connect(weak=False)
    def stop(**_: object) -> None:
        context.stopping.ask()

    @signals.setup_logging.connect(weak=False)
    def keep_our_logging(**_: object) -> None:
        """Being connected is what keeps Celery from setting up its own."""

    worker = app.Worker(
        pool="threads",
        concurrency=1,
        queues=[queue],
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    with Sweeper(context, ring=lambda: ring_if_silent(app, queue)):
        worker.start()


def ring_if_silent(app: celery.Celery, queue: str) -> None:
    """Rings a queue unless a ring already waits in it, so that many sweepers make one ring.

    A broker that is away is logged: the next sweep tries again.
    """
    with app.connection_for_write() as connection:
        try:
            waiting = app.amqp.queues[queue](connection.default_channel)
            if waiting.queue_declare().message_count == 0:
                app.send_task(LOOK_TASK, queue=queue, connection=connection)
        except (OperationalError, *connection.connection_errors) as error:
            log.warning("broker.away", reason=str(error))
