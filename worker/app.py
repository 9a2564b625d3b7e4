"""Service mode: a Celery worker that runs one job for each message."""

import os
import signal
import socket
from collections.abc import Sequence

import celery
import structlog
from celery import signals
from kombu.exceptions import OperationalError

from optigpu.store.workers import LOOK_TASK, broker_url, queue_for, repeated
from optigpu.vocabulary import DeviceKind
from worker.context import WorkerContext
from worker.execute import execute_next
from worker.sweeper import Sweeper

log = structlog.stdlib.get_logger(__name__)

CONFIGURATION: dict[str, object] = {
    # The database holds the job, so that its message is acknowledged at once; the sweeper replaces one that is lost.
    "task_acks_late": False,
    "task_ignore_result": True,
    "task_serializer": "json",
    "accept_content": ["json"],
    # A busy worker leaves the next message to an idle one.
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    # It concerns tasks that are acknowledged late, of which there are none; unset, Celery warns of it.
    "worker_cancel_long_running_tasks_on_connection_loss": True,
    # What `celery inspect` and Flower ask. Heartbeats would wake the host up while it measures.
    "worker_enable_remote_control": True,
    "worker_send_task_events": True,
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
    device = context.info.device
    sweeper = Sweeper(context, send=lambda job_ids: send_if_silent(app, device, job_ids))

    @app.task(name=LOOK_TASK)
    def look(job_id: str | None = None) -> None:
        """Runs one job: while it runs Celery shows its own message. Then jobs whose message was lost are told."""
        if execute_next(context, job_id) and not context.stopping.asked:
            sweeper.ring()
        if context.lost is not None:
            os.kill(os.getpid(), signal.SIGTERM)  # what makes Celery stop: a task cannot tell it to

    @signals.worker_shutting_down.connect(weak=False)
    def stop(**_: object) -> None:
        context.stopping.ask()

    @signals.setup_logging.connect(weak=False)
    def keep_our_logging(**_: object) -> None:
        """Being connected is what keeps Celery from setting up its own."""

    worker = app.Worker(
        hostname=f"{context.info.device}-{context.info.id}@{socket.gethostname()}",
        pool="threads",
        concurrency=1,
        queues=[queue_for(device)],
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    with sweeper:
        worker.start()


def send_if_silent(app: celery.Celery, device: DeviceKind, job_ids: Sequence[str]) -> None:
    """Sends a message for each of these jobs, unless a message waits already: many sweepers then send it once.

    A broker that is away is logged: the next sweep tries again.
    """
    with app.connection_for_write() as connection:
        try:
            waiting = app.amqp.queues[queue_for(device)](connection.default_channel)
            if waiting.queue_declare().message_count == 0:
                for job_id in job_ids:
                    app.send_task(**repeated(job_id, device), connection=connection)
        except (OperationalError, *connection.connection_errors) as error:
            log.warning("broker.away", reason=str(error))
