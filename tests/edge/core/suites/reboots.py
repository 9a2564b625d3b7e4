"""A reboot in every state, and a power cut within every change of the storage."""

from esp32_agent.core.agent import IDLE
from tests.edge.core.suites.agents import agent, cycle, storage
from tests.edge.core.suites.check import equal
from tests.edge.core.suites.machine import Clock, PowerCut
from tests.edge.core.suites.service import Service


def _story(service, keeping, steps):
    """Some steps of an agent; the service asks for a new key in between."""
    found = agent(service, keeping, period_s=1)
    for step in range(steps):
        if step == 4:
            service.rotate = True
        found.step()
    return found


def _recovers(service, keeping, seed):
    """What an agent after the reboot must come to, whatever was before."""
    before = len(service.reports)
    found = cycle(agent(service, keeping, seed=seed, period_s=1), before + 1)
    equal((len(service.claims), service.refused), (1, []))
    equal((found.queue.depth, found.queue.rejected), (0, 0))
    assert found.session.identity.key in service.keys.values()
    return found


def test_a_reboot_after_any_number_of_steps():
    for steps in range(21):
        _reboot_after(steps)


def _reboot_after(steps):
    service, keeping = Service(Clock()), storage()
    known = _story(service, keeping, steps).queue.depth + len(service.reports)
    equal(_recovers(service, keeping, 100 + steps).queue.dropped, 0)
    assert len(service.reports) >= known


def test_a_power_cut_within_every_change_of_the_storage():
    budget = 0
    while _cut_after(budget):
        budget += 29
    assert budget > 1500


def _cut_after(budget):
    """Whether the power was cut before so many bytes were written."""
    service, keeping = Service(Clock()), storage()
    keeping.budget, was_cut = budget, False
    try:
        _story(service, keeping, 16)
    except PowerCut:
        was_cut = True
    keeping.budget = None
    equal(_recovers(service, keeping, 7).queue.dropped in (0, 1), True)
    return was_cut


def test_reports_of_an_earlier_boot_do_not_say_how_long_they_waited():
    service, keeping = Service(Clock()), storage()
    first = agent(service, keeping)
    while first.queue.depth == 0:
        first.step()
    second = agent(service, keeping, seed=2)
    while second.state != IDLE:
        second.step()
    bodies = [body for path, body in service.seen if path.endswith("/measurements")]
    assert b'"waited_us":null' in bodies[0]
    equal(len(service.reports), 2)


def test_two_boots_have_two_boot_ids():
    service, keeping = Service(Clock()), storage()
    first = cycle(agent(service, keeping), 1)
    second = cycle(agent(service, keeping, seed=2), 2)
    assert first.session.boot_id != second.session.boot_id
    equal({sequence for _, sequence in service.reports}, {1})
