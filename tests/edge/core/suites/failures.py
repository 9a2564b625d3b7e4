"""The state machine against every failure: nothing is lost, nothing is stored twice."""

import json

from esp32_agent.core.agent import IDLE, MEASURE, REPORT, SEND, START
from tests.edge.core.suites.agents import agent, cycle, until
from tests.edge.core.suites.check import equal
from tests.edge.core.suites.machine import Clock
from tests.edge.core.suites.service import LOGIN, LOST, PORTAL, PROBLEM, Service

TIMEOUT = "timed out"
NOT_AN_ANSWER = (TIMEOUT, "connection refused", PORTAL, LOGIN, (500, {}, b""), (502, PROBLEM, b"{}"),
                 (200, PROBLEM, b'{"reports":'), (200, PROBLEM, b"{}"), (204, {}, b""), (404, PROBLEM, b"{}"))  # fmt: skip


def _one_report(found):
    service = found.port.http
    equal((len(service.reports), service.refused, found.queue.dropped, found.queue.rejected), (1, [], 0, 0))


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
    for raw in list(found.port.http.reports.values())[:waiting]:
        equal(json.loads(raw)["run_id"], None)


def test_what_is_no_answer_of_the_service_is_sent_again_later():
    for fault in NOT_AN_ANSWER:
        found = until(agent(), SEND)
        found.port.http.faults = [fault, fault, fault]
        cycle(found, 1)
        _one_report(found)
        equal(found.port.http.faults, [])


def test_the_start_of_a_run_survives_the_same():
    for fault in NOT_AN_ANSWER:
        found = until(agent(start_attempts=3), START)
        found.port.http.faults = [fault, fault]
        cycle(found, 1)
        _one_report(found)
        equal(len(found.port.http.runs), 1)


def test_without_an_answer_it_measures_without_a_run():
    found = until(agent(start_attempts=2), START)
    found.port.http.faults = [TIMEOUT, TIMEOUT]
    cycle(found, 1)
    (raw,) = found.port.http.reports.values()
    equal(json.loads(raw)["run_id"], None)


def test_an_upload_whose_answer_was_lost_is_repeated_with_the_same_bytes():
    found = until(agent(), SEND)
    service = found.port.http
    service.faults = [LOST + "connection reset", LOST + TIMEOUT]
    cycle(found, 1)
    _one_report(found)
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
    assert pauses[0] <= 1000 and 150000 <= pauses[-1] <= 300000 and pauses[3] > pauses[0]
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
    found = cycle(agent(), 1)
    service = found.port.http
    service.keys.clear()
    service.claims.clear()
    storage = found.port.storage
    storage.files["identity"] = bytearray(bytes(storage.files["identity"]).replace(b"ABCD", b"WXYZ"))
    cycle(agent(service, storage, seed=5), 2)
    equal(service.refused, [])


def test_a_refused_new_invite_leaves_the_old_key():
    found = cycle(agent(), 1)
    service = found.port.http
    cycle(agent(service, found.port.storage, seed=5, invite="WXYZ-EFGH-JKMN-PQRS"), 2)
    equal((len(service.claims), service.refused), (1, []))


def test_a_conflict_of_sequences_begins_another_boot_id():
    found = until(agent(), SEND)
    boot = found.session.boot_id
    found.port.http.faults = [(409, PROBLEM, b'{"detail":"The sequence is too old."}')]
    cycle(found, 1)
    _one_report(found)
    assert found.session.boot_id != boot


def test_conflicts_without_end_wait():
    found = until(agent(), SEND)
    found.port.http.faults = [(409, PROBLEM, b"{}")] * 5
    found.step()
    equal(found.state, SEND)
    found.step()
    equal(found.state, IDLE)
    cycle(found, 1)
    _one_report(found)


def _with_queue(count):
    """An agent with so many reports that wait, and a service that is there again."""
    found = until(agent(period_s=1, start_attempts=1), START)
    found.port.network.is_up = False
    while found.queue.depth < count:
        found.step()
    found.port.network.is_up = True
    return found


def test_many_reports_go_in_several_messages():
    found = _with_queue(9)
    cycle(found, 9)
    equal((found.port.http.duplicates, found.queue.dropped), (0, 0))


def test_a_poison_report_is_dropped_and_counted_and_the_others_go_on():
    found = until(agent(period_s=1), START)
    found.port.network.is_up = False
    while found.queue.depth < 5:
        found.port.runner.fault = "poison" if found.queue.depth == 2 else None
        found.step()
    found.port.network.is_up = True
    found.port.runner.fault = None
    service = found.port.http
    service.poison = "RunnerError: poison"
    cycle(found, 4)
    equal((found.queue.rejected, found.queue.dropped), (1, 0))
    equal([sequence for _, sequence in sorted(service.reports)][:4], [1, 2, 4, 5])
    until(found, SEND)
    found.step()
    equal(service.last_device["dropped"], 1)


def test_a_message_that_is_too_large_is_split():
    found = _with_queue(5)
    found.port.http.largest = 1500
    cycle(found, 5)
    equal(found.queue.rejected, 0)


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
    _one_report(found)


def test_nothing_is_sent_before_the_time_that_the_service_asked_for():
    found = until(agent(), SEND)
    service = found.port.http
    service.faults = [(429, {"retry-after": "120", "content-type": "application/problem+json"}, b"{}")]
    found.step()
    before, seen = service.clock.now, len(service.seen)
    cycle(found, 1)
    assert service.clock.now - before >= 120000000
    equal(len(service.seen), seen + 1)
    _one_report(found)


def test_a_run_waits_too_where_the_service_asked_for_time():
    found = until(agent(), START)
    found.port.http.faults = [(429, {"retry-after": "90"}, b"")] * 2
    before = found.port.clock.now
    until(found, MEASURE)
    assert found.port.clock.now - before >= 180000000
    equal(len(found.port.http.runs), 1)


def test_a_conflicting_report_is_not_sent_for_ever():
    found = until(agent(), SEND)
    service = found.port.http
    service.reports[(found.session.boot_id, 1)] = b"other bytes"
    until(found, IDLE)
    equal((found.queue.depth, found.queue.rejected), (0, 1))


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


def test_a_model_that_fails_is_reported():
    found = until(agent(), START)
    found.port.runner.fault = "The arena of 1000 bytes is too small."
    cycle(found, 1)
    (raw,) = found.port.http.reports.values()
    equal(json.loads(raw)["error"], "RunnerError: The arena of 1000 bytes is too small.")


def test_golden_inputs_of_another_model_are_reported():
    found = until(agent(), START)
    found.port.storage.files["golden.bin"][8] += 1
    cycle(found, 1)
    (raw,) = found.port.http.reports.values()
    equal(json.loads(raw)["error"], "PortError: golden.bin holds golden inputs of another model.")


def test_a_full_medium_drops_the_report_and_the_agent_goes_on():
    found = until(agent(), REPORT)
    found.port.storage.capacity = found.port.storage.used() + 100
    until(found, IDLE)
    equal((found.queue.dropped, found.port.http.last_device["dropped"]), (1, 1))
    found.port.storage.capacity = None
    cycle(found, 1)


def test_a_medium_that_is_full_before_the_claim_is_said_and_retried():
    found = agent()
    found.port.storage.capacity = found.port.storage.used()
    until(found, IDLE)
    equal(found.notes[-1], "claim: No room is left on the device.")
    found.port.storage.capacity = None
    cycle(found, 1)
