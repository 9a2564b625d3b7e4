"""The state machine where the service refuses: poison goes, the rest stays, and pauses are kept."""

from esp32_agent.core import enrolment
from esp32_agent.core.agent import IDLE, SEND, START
from tests.edge.core.suites.agents import agent, cycle, one_report, until
from tests.edge.core.suites.machine import equal
from tests.edge.core.suites.service import LOST, PORTAL, PROBLEM

TIMEOUT = "timed out"


def test_a_conflict_of_sequences_begins_another_boot_id():
    found = until(agent(), SEND)
    boot = found.session.boot_id
    found.port.http.faults = [(409, PROBLEM, b'{"detail":"The sequence is too old."}')]
    cycle(found, 1)
    one_report(found)
    assert found.session.boot_id != boot


def _with_queue(count):
    """An agent with so many reports that wait, and a service that is there again."""
    found = until(agent(period_s=1, queue_bytes=8192), START)
    found.port.network.is_up = False
    while found.queue.depth < count:
        found.step()
    found.settings.period_s = 600
    found.port.network.is_up = True
    return found


def test_many_reports_go_in_several_messages():
    found = _with_queue(5)
    cycle(found, 5)
    equal((found.port.http.duplicates, found.queue.dropped), (0, 0))


def test_a_poison_report_is_dropped_and_counted_and_the_others_go_on():
    found = until(agent(period_s=1, queue_bytes=8192), START)
    found.port.network.is_up = False
    while found.queue.depth < 4:
        found.port.runner.fault = "poison" if found.queue.depth == 1 else None
        found.step()
    found.port.network.is_up = True
    found.port.runner.fault = None
    service = found.port.http
    service.poison = "RunnerError: poison"
    found.settings.period_s = 600
    cycle(found, 3)
    equal((found.queue.rejected, found.queue.dropped), (1, 0))
    equal([sequence for _, sequence in sorted(service.reports)][:3], [1, 3, 4])
    until(found, SEND)
    found.step()
    equal(service.last_device["dropped"], 1)


def test_a_report_that_is_too_large_alone_is_dropped():
    found = _with_queue(2)
    found.port.http.largest = 600
    while found.queue.depth:
        found.step()
    equal((found.queue.rejected, found.port.http.reports), (2, {}))


def test_a_message_refused_for_the_devices_own_fields_drops_nothing():
    found = until(agent(), SEND)
    errors = b'{"errors":[{"field":"device.rssi","message":"is too large"}]}'
    found.port.http.faults = [(422, PROBLEM, errors)] * 3
    cycle(found, 1)
    one_report(found)


def test_nothing_is_sent_before_the_time_that_the_service_asked_for():
    found = until(agent(), SEND)
    service = found.port.http
    service.faults = [(429, {"retry-after": "120", "content-type": "application/problem+json"}, b"{}")]
    found.step()
    before, requests = service.clock.now, service.requests
    cycle(found, 1)
    assert service.clock.now - before >= 120000000
    equal(service.requests, requests + 1)
    one_report(found)


def test_no_run_begins_while_the_service_asked_for_silence():
    found = until(agent(period_s=10), SEND)
    service = found.port.http
    service.faults = [(429, {"retry-after": "120"}, b"")]
    found.step()
    requests, end = service.requests, service.clock.now + 119000000
    while service.clock.now < end:
        equal(service.requests, requests)
        found.port.clock.sleep_ms(min(1000, found.due_ms()))
        found.step()


def test_a_conflicting_report_is_not_sent_for_ever():
    found = until(agent(), SEND)
    service = found.port.http
    service.reports[(found.session.boot_id, 1)] = "of other bytes"
    until(found, IDLE)
    equal((found.queue.depth, found.queue.rejected), (0, 1))


def test_a_rotation_file_that_outlived_its_rotation_is_not_used_again():
    found = until(agent(), START)
    service, storage = found.port.http, found.port.storage
    service.faults = [LOST + TIMEOUT]
    enrolment.rotate(found.port, found.session)
    left = storage.files["rotation"]
    enrolment.rotate(found.port, found.session)
    storage.files["rotation"] = left
    first = found.session.identity.key
    equal(enrolment.rotate(found.port, found.session).status, 200)
    assert found.session.identity.key != first
    equal("rotation" in storage.files, False)


def test_a_rotation_that_fails_is_tried_again_with_the_same_key():
    for fault in (TIMEOUT, LOST + TIMEOUT, PORTAL, (503, PROBLEM, b"{}")):
        found = until(agent(heartbeat_s=10), START)
        service = found.port.http
        service.rotate = True
        until(found, SEND)
        service.faults = [None, fault]
        cycle(found, 2)
        equal((len(service.rotations), service.refused), (1, []))
        assert found.session.identity.key_id.endswith(".2")
