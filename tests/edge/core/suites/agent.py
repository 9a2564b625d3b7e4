"""The state machine when all goes well, and its clock, heartbeat and key."""

import json

from esp32_agent.core.agent import BOOT, CLAIM, IDLE, MEASURE, REPORT, SEND, START
from tests.edge.core.suites.agents import agent, cycle, until
from tests.edge.core.suites.check import equal, raises
from tests.edge.core.suites.machine import Clock
from tests.edge.core.suites.service import DEVICE, Service


def _only(service):
    equal(len(service.reports), 1)
    return json.loads(service.last)


def test_it_goes_through_its_states_in_order():
    found, seen = agent(), []
    for _ in range(7):
        seen.append(found.state)
        found.step()
    equal(seen, [BOOT, CLAIM, START, MEASURE, REPORT, SEND, IDLE])


def test_its_first_report_arrives_whole():
    found = cycle(agent(), 1)
    report = _only(found.port.http)
    equal((report["sequence"], report["boot_id"]), (1, found.session.boot_id))
    equal((report["run_id"], report["error"]), (found.port.http.runs[0], None))
    equal([window["total_us"] for window in report["windows"]], [1000000, 1000000])
    equal(report["golden"]["count"], 2)
    # Idle power, warm-up, two windows and two golden inputs.
    equal(report["ticks_us"], 1000000 + 50000 + 2000000 + 100000)
    equal(found.port.http.last_device["queue_depth"], 1)


def test_the_next_run_begins_one_period_after_the_last_one_began():
    found = cycle(agent(period_s=600), 1)
    begun = found.port.clock.now
    until(found, START)
    assert 600000000 - 5000000 <= found.port.clock.now - begun <= 600000000 + 60000
    cycle(found, 2)
    equal(sorted(sequence for _, sequence in found.port.http.reports), [1, 2])


def test_many_runs_across_wraps_of_the_ticks():
    found = cycle(agent(period_s=400), 12)
    equal((len(found.port.http.runs), found.port.http.duplicates, found.queue.dropped), (12, 0, 0))
    equal([ticks_us for _, ticks_us in found.port.http.stored], [3150000] * 12)


def test_it_sends_a_heartbeat_while_it_waits():
    found = cycle(agent(period_s=3600, heartbeat_s=300), 1)
    beats = found.port.http.beats
    for _ in range(100):
        if found.state == START:
            break
        found.step()
    assert 10 <= found.port.http.beats - beats <= 12


def test_an_unset_clock_takes_the_servers_time():
    service = Service(Clock(is_set=False))
    found = cycle(agent(service), 1)
    equal(_only(service)["started_us"] > 0, True)
    equal(found.session.clock.unix_us(), service.clock.true_us())


def test_an_unset_clock_is_set_by_a_time_server_where_there_is_one():
    service = Service(Clock(is_set=False))
    service.clock.has_server = True
    cycle(agent(service), 1)
    equal(service.clock.is_set, True)


def test_a_clock_that_is_wrong_is_corrected_and_the_request_is_signed_again():
    for hours in (-2, 2, 24 * 365 * 10):
        service = Service(Clock())
        found = until(agent(service), START)
        service.clock.error_us = hours * 3600000000
        found = cycle(found, 1)
        equal((service.refused, found.session.clock.unix_us()), ([], service.clock.true_us()))


def test_a_clock_before_2020_counts_as_unset():
    service = Service(Clock())
    service.clock.error_us = -26 * 365 * 86400 * 1000000
    cycle(agent(service), 1)
    equal(service.refused, [])


def test_the_key_is_rotated_when_the_service_asks_for_it():
    found = until(agent(), START)
    service = found.port.http
    old = found.session.identity.key
    service.rotate = True
    cycle(found, 1)
    equal(
        (found.session.identity.key_id, sorted(service.keys)), (DEVICE + ".2", [DEVICE + ".1", DEVICE + ".2"])
    )
    assert found.session.identity.key != old
    equal(found.session.identity.key, service.keys[DEVICE + ".2"])
    cycle(found, 2)
    equal((sorted(service.keys), service.refused), ([DEVICE + ".2"], []))  # the first use ended the old one


def test_wrong_settings_are_refused_with_a_sentence():
    equal(raises(ValueError, lambda: agent(windows=0)), "windows must be a whole number from 1 to 64.")
    raises(ValueError, lambda: agent(period_s="60"))
    raises(ValueError, lambda: agent(queue_bytes=100))
