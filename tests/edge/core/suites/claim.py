"""Enrolment: accepted, refused, answered by somebody else, and cut off at every point."""

from esp32_agent.core.claim import DONE, LATER, REFUSED, claim, public_id
from esp32_agent.core.keystore import load_identity
from esp32_agent.core.session import Session
from esp32_agent.core.ticks import Stopwatch
from tests.edge.core.suites.check import equal
from tests.edge.core.suites.machine import Clock, PowerCut, port
from tests.edge.core.suites.service import DEVICE, INVITE, LOGIN, LOST, PORTAL, PROBLEM, Service


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


def test_the_invite_may_be_in_lower_case():
    here, session = _ready()
    equal(claim(here, session, " " + INVITE.lower() + "\n", None).state, DONE)


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


def test_the_pause_that_the_service_asks_for_is_handed_on():
    here, session = _ready()
    here.http.faults = [(429, {"retry-after": "17", "content-type": "application/problem+json"}, b"{}")]
    outcome = claim(here, session, INVITE, None)
    equal((outcome.state, outcome.retry_after_s), (LATER, 17))


def test_a_new_invite_starts_a_new_claim():
    here, session = _ready()
    here.http.faults = ["down", None]
    claim(here, session, "WXYZ-EFGH-JKMN-PQRS", None)
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
