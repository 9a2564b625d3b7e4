"""The golden check: its digest, and files that are not what they say."""

import hashlib

from esp32_agent.core.golden import run_golden
from esp32_agent.port.base import PortError
from tests.edge.core.suites.check import equal, raises
from tests.edge.core.suites.machine import golden_file, port

RUN = "0197a1b2-0000-7000-8000-000000000010"


def _ready(data):
    here = port()
    here.storage.files["golden.bin"] = bytearray(data)
    return here


def _run(here, run_id=RUN):
    return run_golden(here.runner, here.storage, "golden.bin", run_id)


def test_the_digest_is_of_the_run_and_all_outputs_in_order():
    outputs = bytes([255] * 4 + [254] * 4 + [253] * 4)
    wanted = hashlib.sha256(RUN.encode() + outputs).digest().hex()
    equal(_run(_ready(golden_file(3))), (3, wanted))


def test_without_a_run_the_digest_is_of_the_outputs_alone():
    equal(_run(_ready(golden_file(1)), None), (1, hashlib.sha256(bytes([255] * 4)).digest().hex()))


def test_another_run_has_another_digest():
    here = _ready(golden_file(2))
    assert _run(here) != _run(here, RUN[:-1] + "f")


def test_the_outputs_are_the_models_and_not_the_files():
    data = bytearray(golden_file(1))
    data[-4:] = b"zzzz"
    equal(_run(_ready(data)), _run(_ready(golden_file(1))))


def test_no_file_is_no_check():
    here = port()
    equal(_run(here), None)


def test_a_file_that_is_none_is_refused():
    for data in (b"", b"OGLD", b"<!DOCTYPE html><html>", b"\0" * 200):
        raises(PortError, _run, _ready(data))


def test_a_file_cut_short_is_refused_wherever_it_ends():
    whole = golden_file(2)
    for size in range(len(whole) - 4):
        raises(PortError, _run, _ready(whole[:size]))


def test_a_file_of_another_model_is_refused():
    for place in (8, 12):
        data = bytearray(golden_file(2))
        data[place] += 1
        raises(PortError, _run, _ready(data))


def test_an_absurd_count_is_refused():
    for count in (0, 0xFFFFFFFF):
        data = bytearray(golden_file(1))
        data[4:8] = count.to_bytes(4, "little")
        raises(PortError, _run, _ready(data))
