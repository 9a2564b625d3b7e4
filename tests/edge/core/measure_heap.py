"""The heap in bytes that the core takes, in this interpreter: what `gc.mem_alloc()` grows by once garbage is collected.

The WebAssembly build collects all garbage only between two calls from outside, so these are called one by one.
"""

import gc

from tests.edge.core import run_suites

_held = []


def allocated():
    gc.collect()
    return gc.mem_alloc()


def begin_cycle():
    """Agents, machine and service are imported, the latter two made."""
    run_suites.load(run_suites.HELPERS, run_suites.SUITES)
    from tests.edge.core.suites import agents, machine, service

    _held.append(service.Service(machine.Clock()))
    _held.append(agents.storage())


def cycle():
    """Enrolment, two runs with their reports, a new key. The agent stays; what service and files hold goes."""
    from tests.edge.core.suites import agents

    service, storage = _held
    found = agents.agent(service, storage)
    agents.cycle(found, 1)
    service.rotate = True
    agents.cycle(found, 2)
    assert found.session.identity.key_id.endswith(".2")
    service.last = b""
    for held in (service.seen, service.stored, service.reports, service.runs, service.keys, service.claims,
                 service.rotations, storage.files):  # fmt: skip
        held.clear()
    _held.append(found)
