"""Who else is at work on this machine: asked as a job begins, and before anything is measured that counts."""

import math
import time

from optigpu.conductor.session import Session
from optigpu.conductor.verdicts.host_monitor import SERVICE, HostSample
from optigpu.documents.events import Estimated, Waiting
from optigpu.job.estimate import spoken
from optigpu.job.spec import PlanName
from optigpu.vocabulary import DeviceKind

LOOKING = "looking for other processes"
LOOK_S = 1.0
"""The kernel counts CPU time in hundredths of a second: a shorter look would show little."""
FIRST_LOOK_S = 0.4
"""It decides how threads wait, and how long the job is expected to take."""
COSTS = 0.5
"""The share of others' cores that a job feels: some of its parts wait for memory, or use one core."""
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
    spin, they hold the core that the thread they wait for needs. Tells how long the job takes then, about. Raises what
    `progress.check` raises."""
    spec = session.spec
    if not spec.limits.wait_for_quiet_s or spec.device is not DeviceKind.CPU or session.threads < 2:
        return
    session.progress.show(LOOKING)
    sample = _look(session, FIRST_LOOK_S)
    busy = at_work(spec.device, sample)
    if busy is None:
        return
    used = min(1.0, (sample.foreign_s or 0.0) / (sample.wall_s * sample.cpus))
    before_s = session.progress.expected_s
    session.share_cpus(1 / (1 - COSTS * used))
    if spec.plan not in (PlanName.SEARCH, PlanName.BATCH_SCALING):  # of which a round alone is expected
        seconds = session.foreseen_s + session.progress.expected_s - before_s
        told = f"{busy}; beside that it takes about {spoken(seconds)}."
        limit_s, replicates = spec.limits.timeout_s, session.replicates
        session.on_event(Estimated(seconds=seconds, limit_s=limit_s, replicates=replicates, sentence=told))


def wait_for_quiet(session: Session) -> None:
    """Returns as soon as a look shows that other processes rest, and after `limits.wait_for_quiet_s` in any case.
    Raises what `progress.check` raises."""
    wait_s = session.spec.limits.wait_for_quiet_s
    if wait_s == 0:
        return
    session.progress.show(LOOKING)
    busy = _who(session)
    if busy is None:
        return
    session.on_event(Waiting(doing=_doing(busy, wait_s), up_to_s=wait_s))
    until = time.monotonic() + wait_s
    while busy is not None and (left_s := until - time.monotonic()) > 0:
        session.progress.show(_doing(busy, left_s), LOOKING)
        busy = _who(session)


def _who(session: Session) -> str | None:
    """Who is at work; None if nobody is."""
    return at_work(session.spec.device, _look(session, LOOK_S))


def _look(session: Session, seconds: float) -> HostSample:
    before, until = session.monitor.read(), time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        session.progress.check()
        time.sleep(min(POLL_S, left_s))
    return session.monitor.between(before, session.monitor.read())


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
