"""The state machine against every failure and a reboot in every state: nothing is lost, nothing is stored twice."""

import json

from esp32_agent.core.agent import IDLE, REPORT, SEND, START
from tests.edge.core.suites.agents import agent, cycle, one_report, storage, until
from tests.edge.core.suites.machine import Clock, PowerCut, equal
from tests.edge.core.suites.service import LOGIN, LOST, PORTAL, PROBLEM, Service

TIMEOUT = "timed out"
NOT_AN_ANSWER = (
    TIMEOUT,
    "connection refused",
    PORTAL,
    LOGIN,
    (500, {}, b""),
    (502, PROBLEM, b"{}"),
    (200, PROBLEM, b'{"reports":'),
    (200, PROBLEM, b"{}"),
    (204, {}, b""),
    (404, PROBLEM, b"{}"),
)


def test_without_a_network_it_measures_and_sends_later():
    found = until(agent(), START)
    found.port.network.is_up = False
    until(found, SEND)
    for _ in range(30):
        found.step()
    equal((found.port.http.reports, found.queue.depth >= 1), ({}, True))
    waiting = found.queue.depth
    found.port.network.is_up = True
    cycle(found, waiting)
    equal([run_id for run_id, _ in found.port.http.stored[:waiting]], [None] * waiting)


def test_what_is_no_answer_of_the_service_is_sent_again_later():
    for fault in NOT_AN_ANSWER:
        found = until(agent(), SEND)
        found.port.http.faults = [fault, fault, fault]
        cycle(found, 1)
        one_report(found)
        equal(found.port.http.faults, [])


def test_the_start_of_a_run_survives_the_same():
    for fault in NOT_AN_ANSWER:
        found = until(agent(start_attempts=3), START)
        found.port.http.faults = [fault, fault]
        cycle(found, 1)
        one_report(found)
        equal(len(found.port.http.runs), 1)


def test_without_an_answer_it_measures_without_a_run():
    found = until(agent(start_attempts=2), START)
    found.port.http.faults = [TIMEOUT, TIMEOUT]
    cycle(found, 1)
    equal(len(found.port.http.reports), 1)
    equal(json.loads(found.port.http.last)["run_id"], None)


def test_an_upload_whose_answer_was_lost_is_repeated_with_the_same_bytes():
    found = until(agent(), SEND)
    service = found.port.http
    service.faults = [LOST + "connection reset", LOST + TIMEOUT]
    cycle(found, 1)
    one_report(found)
    equal(service.duplicates, 2)


def test_a_refused_claim_is_tried_again_more_and_more_slowly():
    service = Service(Clock())
    found = agent(service, invite="ABCD-EFGH-JKMN-PQRT")
    pauses = []
    for _ in range(14):
        until(found, IDLE)
        pauses.append(found.due_ms())
        while found.state == IDLE:
            found.step()
    assert pauses[0] <= 1000 < pauses[3] < 150000 <= pauses[-1] <= 300000
    equal((service.keys, found.session.identity), ({}, None))


def test_an_unknown_key_goes_on_measuring_and_keeps_its_reports():
    found = until(agent(), START)
    service = found.port.http
    kept = dict(service.keys)
    service.keys.clear()  # revoked
    until(until(found, SEND), IDLE)
    equal((found.queue.depth, service.reports), (1, {}))
    service.keys.update(kept)
    cycle(found, 1)
    equal((len(service.reports), found.queue.dropped), (1, 0))


def test_a_new_invite_enrols_a_revoked_device_again():
    service, keeping = Service(Clock()), storage()
    cycle(agent(service, keeping), 1)
    service.keys.clear()
    service.claims.clear()
    keeping.files["identity"] = bytearray(bytes(keeping.files["identity"]).replace(b"ABCD", b"WXYZ"))
    cycle(agent(service, keeping, seed=5), 2)
    equal(service.refused, [])


def test_a_refused_new_invite_leaves_the_old_key():
    service, keeping = Service(Clock()), storage()
    cycle(agent(service, keeping), 1)
    cycle(agent(service, keeping, seed=5, invite="WXYZ-EFGH-JKMN-PQRS"), 2)
    equal((len(service.claims), service.refused), (1, []))


def test_a_medium_that_is_full_before_the_claim_is_said_and_retried():
    found = agent()
    found.port.storage.capacity = found.port.storage.used()
    until(found, IDLE)
    equal(found.notes[-1], "claim: No room is left on the device.")
    found.port.storage.capacity = None
    cycle(found, 1)


def test_a_model_that_fails_is_reported():
    found = until(agent(), START)
    found.port.runner.fault = "The arena of 1000 bytes is too small."
    cycle(found, 1)
    equal(len(found.port.http.reports), 1)
    equal(json.loads(found.port.http.last)["error"], "RunnerError: The arena of 1000 bytes is too small.")


def test_a_full_medium_drops_the_report_and_the_agent_goes_on():
    found = until(agent(), REPORT)
    found.port.storage.capacity = found.port.storage.used() + 100
    until(found, IDLE)
    equal((found.queue.dropped, found.port.http.last_device["dropped"]), (1, 1))
    found.port.storage.capacity = None
    cycle(found, 1)


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
