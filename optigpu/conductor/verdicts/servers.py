"""The servers on this machine that a job asks: their work is the job's own, as an engine's is."""

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil

from optigpu.documents.endpoints import parse_endpoint


def serving_sessions(endpoints: Iterable[str]) -> frozenset[int]:
    """The sessions of the processes that listen where these endpoints are.

    Of a server elsewhere, and of one whose process another user started and hides, there is none.
    """
    parsed = map(parse_endpoint, endpoints)
    ports = {endpoint.port for endpoint in parsed if endpoint.is_loopback}
    if not ports:
        return frozenset()
    found: set[int] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            connections = process.net_connections("tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port in ports for each in connections):
                found.add(os.getsid(process.pid))
    return frozenset(found)
