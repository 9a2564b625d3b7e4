"""Waits until others rest before anything is measured that counts; rough figures come before."""

import math
import time

from optigpu.conductor.session import Session
from optigpu.conductor.verdicts.host_monitor import SERVICE, HostSample
from optigpu.documents.events import Waiting
from optigpu.vocabulary import DeviceKind

LOOKING = "looking for other processes"
LOOK_S = 1.0
"""The kernel counts CPU time in hundredths of a second: a shorter look would show little."""
FIRST_LOOK_S = 0.4
"""It decides nothing but how threads wait."""
POLL_S = 0.2
BUSY_CORES, BUSY_SHARE, BUSY_CORES_AT_MOST = 0.25, 0.01, 0.5
"""So many cores of others are worth waiting for: a hundredth of the host's, within these bounds. Rounds that are set
aside and wider intervals deal with less, and a steady fifth of a core would make every job wait in vain."""
FREE_CORES = 0.5
"""A job on a GPU starts beside any load that leaves so much of the CPUs idle."""
WORTH_NAMING = 0.2
"""Of the CPU time of all others."""


def share_cpus(session: Session) -> None:
    """Where others are at work as a job begins, threads of its processes sleep while they wait for each other: if they
    spin, they hold the core that the thread they wait for needs. Raises what `progress.check` raises."""
    spec = session.spec
    if spec.limits.wait_for_quiet_s and spec.device is DeviceKind.CPU and session.threads > 1:
        session.progress.show(LOOKING)
        if _look(session, FIRST_LOOK_S):
            session.share_cpus()


def wait_for_quiet(session: Session) -> None:
    """Returns as soon as a look shows that other processes rest, and after `limits.wait_for_quiet_s` in any case.
    Raises what `progress.check` raises."""
    wait_s = session.spec.limits.wait_for_quiet_s
    if wait_s == 0:
        return
    session.progress.show(LOOKING)
    busy = _look(session)
    if busy is None:
        return
    session.on_event(Waiting(doing=_doing(busy, wait_s), up_to_s=wait_s))
    until = time.monotonic() + wait_s
    while busy is not None and (left_s := until - time.monotonic()) > 0:
        session.progress.show(_doing(busy, left_s), LOOKING)
        busy = _look(session)


def _look(session: Session, seconds: float = LOOK_S) -> str | None:
    """Who is at work during one look; None if nobody is."""
    before, until = session.monitor.read(), time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        session.progress.check()
        time.sleep(min(POLL_S, left_s))
    return at_work(session.spec.device, session.monitor.between(before, session.monitor.read()))


def _doing(busy: str, wait_s: float) -> str:
    return f"{busy}; waiting up to {math.ceil(wait_s)} s for quiet"


def at_work(device: DeviceKind, sample: HostSample) -> str | None:
    """Who uses so much of the machine that a job should wait, for example "cc1plus uses 1.1 of 2 cores"."""
    if sample.gpu_foreign:
        several = sample.gpu_foreign > 1
        return (
            f"{sample.gpu_foreign} other processes use the GPU" if several else "Another process uses the GPU"
        )
    has_free_cores = sample.idle_s is None or sample.idle_s >= FREE_CORES * sample.wall_s
    if sample.foreign_s is None or (device is not DeviceKind.CPU and has_free_cores):
        return None
    named = {name: seconds for name, seconds in sample.named.items() if name != SERVICE}
    others_s = sample.foreign_s - sample.named.get(SERVICE, 0.0)
    cores = others_s / sample.wall_s
    if cores <= min(max(BUSY_CORES, BUSY_SHARE * sample.cpus), BUSY_CORES_AT_MOST):
        return None
    worth_naming = (name for name, seconds in named.items() if seconds >= WORTH_NAMING * others_s)
    names = sorted(worth_naming, key=lambda name: -named[name])
    who = f"{' and '.join(names)} {'uses' if len(names) == 1 else 'use'}" if names else "Other processes use"
    return f"{who} {cores:.1f} of {sample.cpus} core{'s' if sample.cpus > 1 else ''}"
