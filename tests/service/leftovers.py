"""Finds every process that a program has started, however deep and in whatever group: by a mark in its environment."""

import time

import psutil


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """The processes whose environment has `name=value`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def processes_left(name: str, value: str, *, within_s: float = 30.0) -> list[psutil.Process]:
    """What is still there when the time is over; empty as soon as nothing is."""
    deadline = time.monotonic() + within_s
    while (left := processes_with(name, value)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
