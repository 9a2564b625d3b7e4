"""Whole agents over the service in memory, for the suites of the state machine."""

from esp32_agent.core.agent import IDLE, Agent, Settings
from tests.edge.core.suites.machine import Clock, Storage, collect_garbage, equal, golden_file, port
from tests.edge.core.suites.service import INVITE, Service


class Quiet(Agent):
    """Keeps its last notes instead of printing them."""

    def __init__(self, here, settings):
        self.notes = []
        super().__init__(here, settings)

    def note(self, text):
        self.notes = self.notes[-3:]
        self.notes.append(f"{self.state}: {text}")


def settings(**changes):
    values = {
        "invite": INVITE,
        "windows": 2,
        "window_s": 1,
        "warmup": 1,
        "period_s": 600,
        "start_attempts": 1,
    }
    values["queue_bytes"], values["batch_bytes"] = 6144, 2048  # the tests lie in the same small heap
    values.update(changes)
    return Settings(**values)


def storage():
    found = Storage()
    found.files["golden.bin"] = bytearray(golden_file(2))
    return found


def agent(service=None, keeping=None, seed=1, **changes):
    """An agent that boots now, on a new clock and a new service unless one is handed in."""
    service = service or Service(Clock())
    collect_garbage()
    here = port(service, storage() if keeping is None else keeping, service.clock, seed)
    return Quiet(here, settings(**changes))


def until(found, state, most=300):
    """Steps until the state is reached."""
    for _ in range(most):
        if found.state == state:
            return found
        found.step()
    raise AssertionError(f"{found.state} after {most} steps, not {state}: {found.notes}")


def cycle(found, runs, most=2000):
    """Steps until the service has so many reports and the agent has nothing to do."""
    service = found.port.http
    for _ in range(most):
        if len(service.reports) >= runs and found.state == IDLE and found.queue.depth == 0:
            return found
        found.step()
    raise AssertionError(f"{len(service.reports)} reports after {most} steps, {found.state}: {found.notes}")


def one_report(found):
    """One report arrived, no signature was refused, nothing was lost."""
    service = found.port.http
    equal((len(service.reports), service.refused, found.queue.dropped, found.queue.rejected), (1, [], 0, 0))
