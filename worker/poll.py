"""Embedded mode: no broker, the worker looks for work by itself."""

import signal
from typing import Any

from worker.execute import execute_next
from worker.station import Station
from worker.sweeper import Sweeper


def serve(station: Station) -> None:
    """Looks for work every `poll_s` seconds until the process is told to end."""

    def stop(*_: Any) -> None:
        station.stopping.ask()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with Sweeper(station):
        while not station.stopping.asked:
            if not execute_next(station):
                station.stopping.wait(station.settings.poll_s)
