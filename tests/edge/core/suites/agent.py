"""Enrolment, and the state machine when all goes well, with its clock, heartbeat and key."""

import json

from esp32_agent.core.agent import BOOT, CLAIM, IDLE, MEASURE, REPORT, SEND, START
from esp32_agent.core.enrolment import DONE, LATER, REFUSED, claim, public_id
from esp32_agent.core.keys import load_identity
from esp32_agent.core.session import Session
from esp32_agent.core.timing import Stopwatch
from tests.edge.core.suites.agents import agent, cycle, until
from tests.edge.core.suites.machine import Clock, PowerCut, equal, port
from tests.edge.core.suites.service import DEVICE, INVITE, LOGIN, LOST, PORTAL, PROBLEM, Service


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


def test_a_clock_that_is_wrong_is_corrected_and_the_request_is_signed_again():
    for hours in (-2, 2, 24 * 365 * 10):
        service = Service(Clock())
        found = until(agent(service), START)
        service.clock.error_us = hours * 3600000000
        found = cycle(found, 1)
        equal((service.refused, found.session.clock.unix_us()), ([], service.clock.true_us()))


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


def _ready(storage=None, service=None, seed=1):
    clock = service.clock if service else Clock()
    here = port(service or Service(clock), storage, clock, seed)
    return here, Session(here, Stopwatch(clock), 10)


def test_an_accepted_claim_is_kept():
    here, session = _ready()
    outcome = claim(here, session, INVITE, "bench 3")
    equal((outcome.state, outcome.reason), (DONE, DEVICE))
    kept = load_identity(here.storage)
    equal((kept.device_id, kept.key_id, kept.invite), (DEVICE, DEVICE + ".1", "ABCD"))
    equal(here.http.keys, {DEVICE + ".1": kept.key})
    equal(sorted(here.storage.files), ["identity"])


def test_the_key_is_never_sent_nor_the_secret():
    here, session = _ready()
    claim(here, session, INVITE, None)
    _, body = here.http.seen[0]
    assert session.identity.key.hex().encode() not in body
    assert b"EFGH" not in body
    assert b"PQRS" not in body


def test_a_wrong_code_is_refused_and_nothing_is_kept_as_identity():
    here, session = _ready()
    outcome = claim(here, session, INVITE[:-1] + "T", None)
    equal((outcome.state, load_identity(here.storage), session.identity), (REFUSED, None, None))


def test_an_invite_that_is_none_is_refused_without_a_request():
    for invite in ("", "ABCD", "ABCD-EFGH-JKMN", "ABCD-EFGH-JKMN-PQRST", "ABCD EFGH JKMN PQRS"):
        here, session = _ready()
        equal((claim(here, session, invite, None).state, here.http.seen), (REFUSED, []))
        equal(public_id(invite), "")


def test_after_a_lost_answer_the_same_claim_goes_out_again():
    here, session = _ready()
    here.http.faults = [LOST + "connection reset"]
    equal(claim(here, session, INVITE, None).state, LATER)
    equal(claim(here, session, INVITE, None).state, DONE)
    equal(here.http.seen[0], here.http.seen[1])
    equal(len(here.http.claims), 1)


def test_what_is_no_answer_of_the_service_is_tried_again():
    for fault in ("timeout", PORTAL, LOGIN, (500, {}, b""), (503, PROBLEM, b"{}"), (201, PROBLEM, b"[]"),
                  (201, PROBLEM, b'{"device_id":"x y","key_id":"1"}'), (403, {"content-type": "text/html"}, b"no"),
                  (200, PROBLEM, b'{"device_id":"a"}')):  # fmt: skip
        here, session = _ready()
        here.http.faults = [fault]
        equal((claim(here, session, INVITE, None).state, load_identity(here.storage)), (LATER, None))
        equal(claim(here, session, INVITE, None).state, DONE)


def test_a_power_cut_anywhere_in_the_claim_leaves_one_device_and_one_key():
    budget, was_cut = 0, True
    while was_cut:
        service = Service(Clock())
        here, session = _ready(None, service)
        here.storage.budget, was_cut = budget, False
        try:
            claim(here, session, INVITE, None)
        except PowerCut:
            was_cut = True
        here.storage.budget = None
        again, session = _ready(here.storage, service, seed=99)
        session.identity = load_identity(again.storage)
        if session.identity is None:
            equal(claim(again, session, INVITE, None).state, DONE)
        equal((len(service.claims), service.keys), (1, {DEVICE + ".1": load_identity(again.storage).key}))
        equal(session.post("/measurements", b'{"device":{},"reports":[]}').status, 200)
        budget += 5
    assert budget > 150


def test_a_damaged_identity_is_none():
    here, session = _ready()
    claim(here, session, INVITE, None)
    whole = bytes(here.storage.files["identity"])
    for data in (b"", whole[:-1], whole[:-2], whole[1:].replace(b"\n", b" "), b"\xff" * 80, whole + b"\n"):
        here.storage.files["identity"] = bytearray(data)
        equal(load_identity(here.storage), None)
