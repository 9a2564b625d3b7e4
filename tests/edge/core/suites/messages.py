"""What is signed, sealed and sent, byte by byte."""

import hashlib
import json

from esp32_agent import VERSION
from esp32_agent.core import message
from esp32_agent.core.keys import (
    Stamp,
    authorization,
    claim_code,
    hmac_sha256,
    proof,
    seal,
    seal_rotation,
    string_to_sign,
)
from esp32_agent.core.measuring import Window, measure
from esp32_agent.core.message import Run, Writer, build
from esp32_agent.core.session import Answer
from tests.edge.core.suites.machine import equal, port
from tests.edge.core.suites.service import JSON, PORTAL, PROBLEM

BOOT = "0011223344556677"
RUN = "0197a1b2-0000-7000-8000-000000000010"
REPORT = (
    '{"schema":1,"boot_id":"0011223344556677","sequence":3,"run_id":"0197a1b2-0000-7000-8000-000000000010",'
    '"model_sha256":"' + "ab" * 32 + '","input_bytes":12,"input_source":"fixed",'
    '"runner":{"name":"simulator","version":"1"},"board":"esp32s3-n16r8","clock_hz":240000000,'
    '"firmware_sha256":"' + "cd" * 32 + '","warmup":2,'
    '"windows":[{"count":20,"total_us":1000000,"energy_uj":7000},{"count":20,"total_us":1000000,"energy_uj":null}],'
    '"latency_us":{"count":20,"min":50000,"p50":50000,"p90":null,"p99":null},'
    '"power":{"source":"simulated","idle_uw":500000},"golden":{"count":8,"digest":"' + "ef" * 32 + '"},'
    '"arena_bytes":210288,"heap_free":123456,"started_us":1790000000000000,"ticks_us":2200000,"error":null}'
)


def _run():
    run = Run(BOOT, 3, RUN, 1790000000000000)
    run.ticks_us = 2200000
    return run


def test_a_report_is_these_bytes():
    here, run = port(), _run()
    run.measurement = measure(here, 1, 1, 2)
    run.measurement.windows.append(Window(20, 1000000, None))
    run.golden = (8, "ef" * 32)
    equal(build(here, run).decode(), REPORT)
    json.loads(REPORT)


def test_a_run_that_failed_is_reported_with_its_error():
    run = _run()
    run.run_id, run.error = None, "RunnerError: " + "x" * 300
    found = json.loads(build(port(), run))
    equal((found["windows"], found["golden"], found["run_id"], found["warmup"]), ([], None, None, 0))
    equal(found["latency_us"], {"count": 0, "min": None, "p50": None, "p90": None, "p99": None})
    equal(found["error"], "RunnerError: " + "x" * 187)


def test_text_is_ascii_and_escaped():
    writer = Writer(8)
    writer.value('a"\\\n\x7f\u00e9\u20ac\U0001f600')
    equal(writer.done(), b'"a\\"\\\\\\u000a\\u007f\\u00e9\\u20ac\\ud83d\\ude00"')
    writer = Writer(8)
    writer.begin("{")
    writer.field("yes", True)
    writer.field("no", False)
    writer.end("}")
    equal(writer.done(), b'{"yes":true,"no":false}')


def test_a_message_holds_the_reports_as_they_are():
    here = port()
    now = message.Item(message.record(BOOT, 3, 5000000, b'{"a":1}'))
    earlier = message.Item(message.record("ff" * 8, 9, 5000000, b'{"b":2}'))
    state = message.State(-61, 2, 1, 8000000)
    equal(
        message.compose(here.board, state, BOOT, [now, earlier]).decode(),
        '{"schema":1,"device":{"board":"esp32s3-n16r8","reset_reason":"power_on","rssi":-61,"heap_free":123456,'
        '"queue_depth":2,"dropped":1,"agent_version":"' + VERSION + '","uptime_us":8000000},'
        '"reports":[{"waited_us":3000000,"report":{"a":1}},{"waited_us":null,"report":{"b":2}}]}',
    )
    beat = json.loads(message.compose(here.board, message.State(None, 0, 0, 1), BOOT, []))
    equal((beat["reports"], beat["device"]["rssi"]), ([], None))


def _answer(status, document, headers=JSON):
    return Answer(status, headers, json.dumps(document).encode())


def test_only_an_answer_that_names_every_report_stores_them():
    items = [message.Item(message.record(BOOT, sequence, 0, b"{}")) for sequence in (1, 2)]
    named = [{"boot_id": BOOT, "sequence": sequence, "state": "accepted"} for sequence in (1, 2)]
    equal(message.outcome(_answer(200, {"reports": named}), items), message.STORED)
    for wrong in (None, [], named[:1], named[::-1], named + named[:1], [1, 2], "ab", [named[0], None]):
        equal(message.outcome(_answer(200, {"reports": wrong}), items), message.LATER)
    equal(message.outcome(_answer(201, {"reports": named}), items), message.LATER)
    equal(
        message.outcome(_answer(200, {"reports": named}, {"content-type": "text/html"}), items), message.LATER
    )
    equal(message.outcome(_answer(200, named), items), message.LATER)
    equal(message.outcome(Answer(*PORTAL), items), message.LATER)
    equal(message.outcome(Answer(200, JSON, b'{"reports":'), items), message.LATER)
    equal(message.outcome(Answer(200, JSON, b"[" * 3000), items), message.LATER)
    equal(message.outcome(Answer(200, JSON, b"\xff\xfe"), items), message.LATER)
    equal(message.outcome(Answer(0, {}, b"", "timeout"), items), message.LATER)


def test_a_refusal_of_the_devices_own_fields_is_not_the_reports_fault():
    items = [message.Item(message.record(BOOT, 1, 0, b"{}"))]
    errors = {"errors": [{"field": "device.rssi", "message": "is too large"}]}
    equal(message.outcome(_answer(422, errors, PROBLEM), items), message.LATER)
    errors = {"errors": [{"field": "reports.0.report.windows", "message": "is empty"}]}
    equal(message.outcome(_answer(422, errors, PROBLEM), items), message.POISON)
    equal(message.outcome(_answer(413, {}, PROBLEM), items), message.POISON)
    equal(message.outcome(_answer(400, {"detail": "No JSON."}, PROBLEM), items), message.POISON)
    equal(
        message.outcome(Answer(400, {"content-type": "text/html"}, b"<html>Bad Request</html>"), items),
        message.LATER,
    )
    equal(message.outcome(_answer(422, {}, PROBLEM), []), message.LATER)


def test_retry_after_is_read_in_seconds_and_bounded():
    for text, wanted in (("7", 7), ("0", 0), ("999999", 3600), ("", None), ("-1", None), ("1.5", None),
                         ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("9" * 5000, None), ("\u00b2", None)):  # fmt: skip
        equal(Answer(429, {"retry-after": text}, b"").retry_after_s, wanted)


def test_names_that_could_break_a_header_are_not_taken():
    for value, wanted in (("a-B_1.2", "a-B_1.2"), ("a b", None), ("a,b", None), ("a\nb", None), ("", None),
                          ("\u00e9", None), (5, None), (None, None), ("x" * 81, None), ("../x", None)):  # fmt: skip
        equal(_answer(201, {"run_id": value}).name("run_id"), wanted)


# Key, data, HMAC-SHA256: test cases 2 and 7.
RFC_4231 = (
    (
        b"Jefe",
        b"what do ya want for nothing?",
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
    ),
    (
        b"\xaa" * 131,
        b"This is a test using a larger than block-size key and a larger than block-size data. "
        b"The key needs to be hashed before being used by the HMAC algorithm.",
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
    ),
)

STAMP = Stamp("0197a1b2-0000-7000-8000-000000000001.1", 1790000000123456, "00ff" * 4, 7, "cd" * 32)
PATH = "/v1/devices/0197a1b2-0000-7000-8000-000000000001/measurements"


def test_hmac_is_that_of_rfc_4231():
    for key, data, wanted in RFC_4231:
        equal(hmac_sha256(key, data).hex(), wanted)


def test_the_string_to_sign_has_nine_lines():
    wanted = (
        "OptiGPU1\nPOST\n" + PATH + "\n0197a1b2-0000-7000-8000-000000000001.1\n1790000000123456\n"
        "00ff00ff00ff00ff\n7\n" + "cd" * 32 + "\n" + hashlib.sha256(b"{}").digest().hex()
    )
    equal(string_to_sign("POST", PATH, STAMP, b"{}"), wanted.encode())


def test_the_header_names_all_that_is_signed():
    key = bytes(range(32))
    signature = hmac_sha256(key, string_to_sign("POST", PATH, STAMP, b"{}")).hex()
    equal(
        authorization(key, "POST", PATH, STAMP, b"{}"),
        "OptiGPU1 key=0197a1b2-0000-7000-8000-000000000001.1,time=1790000000123456,boot=00ff00ff00ff00ff,seq=7,"
        + "fw="
        + "cd" * 32
        + ",sig="
        + signature,
    )


def test_any_change_changes_the_signature():
    key = bytes(range(32))
    found = [authorization(key, "POST", PATH, STAMP, b"{}")]
    found.append(authorization(key[1:] + key[:1], "POST", PATH, STAMP, b"{}"))
    found.append(authorization(key, "PUT", PATH, STAMP, b"{}"))
    found.append(authorization(key, "POST", PATH + "x", STAMP, b"{}"))
    found.append(authorization(key, "POST", PATH, STAMP, b"{ }"))
    for name, value in (
        ("key_id", "other.1"), ("time_us", 0), ("boot_id", "11" * 8), ("sequence", 8), ("firmware", "ee" * 32),
    ):  # fmt: skip
        other = Stamp(STAMP.key_id, STAMP.time_us, STAMP.boot_id, STAMP.sequence, STAMP.firmware)
        setattr(other, name, value)
        found.append(authorization(key, "POST", PATH, other, b"{}"))
    equal(len({each[-64:] for each in found}), 10)


def test_the_claim_code_forgets_dashes_and_case():
    wanted = hashlib.sha256(b"optigpu-claim:EFGHJKMNPQRS").digest()
    equal(claim_code("EFGH-JKMN-PQRS"), wanted)
    equal(claim_code("efghjkmnpqrs"), wanted)


def test_a_sealed_key_opens_with_the_code_alone():
    key, code, nonce = bytes(range(32)), claim_code("EFGH-JKMN-PQRS"), "ab" * 16
    mask = hmac_sha256(code, b"optigpu-seal:" + nonce.encode())
    sealed = seal(key, code, nonce)
    equal(sealed, bytes([key[place] ^ mask[place] for place in range(32)]).hex())
    equal(seal(bytes.fromhex(sealed), code, nonce), key.hex())
    assert seal(bytes.fromhex(sealed), claim_code("EFGH-JKMN-PQRT"), nonce) != key.hex()


def test_the_proof_binds_all_of_the_claim():
    code = claim_code("EFGH-JKMN-PQRS")
    text = "optigpu-proof:" + "ab" * 16 + ":" + "12" * 32 + ":esp32s3-n16r8:" + "cd" * 32
    wanted = hmac_sha256(code, text.encode()).hex()
    equal(proof(code, "ab" * 16, "12" * 32, "esp32s3-n16r8", "cd" * 32), wanted)


def test_a_rotation_is_sealed_with_the_old_key():
    new, old, nonce = bytes(range(32)), b"o" * 32, "cd" * 16
    mask = hmac_sha256(old, b"optigpu-rotate:" + nonce.encode())
    equal(seal_rotation(new, old, nonce), bytes([new[place] ^ mask[place] for place in range(32)]).hex())
