"""Embedded mode: no broker, the worker looks for work by itself."""

import signal

from worker.context import WorkerContext
from worker.execute import execute_next
from worker.sweeper import Sweeper


def serve(context: WorkerContext) -> None:
    """Looks for a job every `poll_s` seconds until the process is asked to stop."""

    def stop(*_: object) -> None:
        context.stopping.ask()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with Sweeper(context):
        while not context.stopping.asked:
            if not execute_next(context):
                context.stopping.wait(context.settings.poll_s)
