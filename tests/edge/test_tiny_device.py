"""The device's side of MLPerf Tiny's protocol, command by command: what it answers, and that nothing ends it."""

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp32_agent.tiny.codec import Codec, Scale
from esp32_agent.tiny.device import FIRMWARE, TinyDevice
from tests.edge import tools
from tests.edge.tiny_parts import BYTES, Port
from tests.pages import ROOT


class Stream:
    """What the runner sends in pieces, and what the device answers; it takes only a few bytes at once."""

    def __init__(self, sent: bytes = b"") -> None:
        self.sent, self.answered = sent, b""

    def read(self, count: int) -> bytes:
        piece, self.sent = self.sent[:count], self.sent[count:]
        return piece

    def write(self, data: bytes) -> int:
        self.answered += data[:7]
        return len(data[:7])


class Bench:
    """A device of a profile, and one command at a time."""

    def __init__(self, profile: str = "ic01", pulse: Callable[[], None] | None = None) -> None:
        self.port, self.stream = Port(), Stream()
        codec = Codec(profile, BYTES, Scale(0.5, 1), Scale(0.25, -128))
        self.device = TinyDevice(cast(Any, self.port), cast(Any, self.stream), codec, "a [vendor]", pulse)

    def __call__(self, command: str) -> list[str]:
        self.stream.answered = b""
        self.device.command(command)
        lines = self.stream.answered.decode().split("\r\n")
        assert lines[-2:] == ["m-ready", ""]
        return lines[:-2]


@pytest.fixture
def ask() -> Bench:
    return Bench()


def loaded(ask: Bench, data: bytes = bytes(range(BYTES))) -> Bench:
    ask(f"db load {len(data)}")
    assert ask(f"db {data.hex()}") == ["m-load-done"]
    return ask


def test_an_input_is_loaded_and_printed(ask: Bench) -> None:
    data = bytes(range(100, 100 + BYTES))
    assert ask(f"db load {BYTES}") == [f"m-[Expecting {BYTES} bytes]"]
    assert ask(f"db {data[:7].hex()}") == []
    assert ask(f"db {data[7:].hex().upper()}ffff") == ["m-load-done"], "the rest of the digits is not needed"
    assert ask("db print") == ["m-buffer-64-65-66-67-68-69-6a-6b", "m-buffer-6c-6d-6e-6f"]


def test_in_energy_mode_a_timestamp_is_a_pulse() -> None:
    pulses: list[None] = []
    ask = loaded(Bench(pulse=lambda: pulses.append(None)))
    assert not any(line.startswith("m-lap-us") for line in ask("infer 2 0"))
    assert ask("timestamp") == []
    assert len(pulses) == 3
    ask.device.boot()
    assert b"m-timestamp-mode-energy\r\nm-init-done" in ask.stream.answered
    assert len(pulses) == 4


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("", "Unknown command: "),
        ("dance [now]", "Unknown command: dance"),
        ("x]y", "Unknown command: x y"),
        ("db", "Command 'db' requires a subcommand"),
        ("db load", "Command 'db load' requires the # of bytes"),
        *(
            (f"db load {text}", "Command 'db load' must be >0 bytes")
            for text in ("0", "-1", "1e3", "0x10", "9" * 30)
        ),
        ("db load 27649", "Supplied buffer size 27649 exceeds maximum of 27648"),
        ("db 00", "Command 'db load' must come first"),
        *((f"infer {text}", "Inference iterations must be >0") for text in ("0", "-3", "x", "1.5", "+1")),
        *((f"infer 1 {text}", "Inference warmup must be >=0") for text in ("-1", "x")),
        ("infer 1 1000001", "Inference iterations and warmup must be at most 1000000"),
        ("infer 1", f"Input has 0 of {BYTES} bytes"),
        ("results", "No inference yet"),
    ],
)
def test_what_cannot_be_done_is_an_error_line(ask: Bench, command: str, error: str) -> None:
    assert ask(command) == [f"e-[{error}]"]
    assert ask("name"), "it goes on"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0", "Insufficient number of hex digits"),
        ("0g", "Invalid hex digit '0g'"),
        ("_1", "Invalid hex digit '_1'"),
    ],
)
def test_bytes_that_are_no_hex_are_refused_whole(ask: Bench, text: str, error: str) -> None:
    ask("db load 4")
    ask("db 01")
    assert ask(f"db 02{text}") == [f"e-[{error}]"]
    assert ask("db print") == ["m-buffer-01"]


@pytest.mark.parametrize("error", [RuntimeError("bad\r\nm-ready [x]"), MemoryError(), OSError(5)])
def test_an_inference_that_fails_is_an_error_line_and_leaves_no_result(ask: Bench, error: Exception) -> None:
    loaded(ask)
    ask("infer 1 0")
    ask.port.runner.error = error
    lines = ask("infer 1 0")
    assert lines[-1].startswith("e-[")
    assert lines[-1].count("[") == 1
    assert ask("results") == ["e-[No inference yet]"]


def test_profiles_read_their_input_in_their_own_way() -> None:
    data = bytes([0, 127, 128, 255])
    scale = Scale(0.5, 1)
    assert Codec("ic01", 4, scale, scale).input(data) == bytes([0x80, 0xFF, 0x00, 0x7F])
    assert Codec("kws01", 4, scale, scale).input(data) == data
    floats = struct.pack("<5f", 0.0, 1.0, -1.0, 1000.0, -1000.0)
    anomaly = Codec("ad01", 5, scale, scale)
    assert anomaly.buffer_bytes == 20
    assert anomaly.input(floats) == struct.pack("5b", 1, 3, -1, 127, -128)
    distance = anomaly.results(floats[:8], struct.pack("2b", 1, 5))  # 0.0 and 2.0 for 0.0 and 1.0
    assert distance == [0.5]


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_an_input_that_is_not_finite_is_an_error_line(number: float) -> None:
    ask = loaded(Bench("ad01"), struct.pack("<12f", *[0.0] * 11, number))
    assert ask("infer 1 0") == ["e-[Input with a number that is not finite]"]


def test_a_model_that_does_not_fit_the_protocol_is_refused() -> None:
    scale = Scale(1.0, 0)
    with pytest.raises(ValueError, match="takes 27649 bytes and the protocol carries 27648"):
        Codec("ic01", 27649, scale, scale)
    with pytest.raises(ValueError, match="unknown profile sww01; there are ad01, ic01, kws01, vww01"):
        Codec("sww01", 10, scale, scale)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_end_a_device(noise: bytes) -> None:
    ask = Bench()
    ask.stream.sent = noise + b"%name%"
    ask.device.serve()
    lines = ask.stream.answered.decode("ascii").split("\r\n")
    assert lines[-3:] == ["m-name-dut-[a  vendor ]", "m-ready", ""]
    assert all(line.isprintable() for line in lines)


SENT = (
    b"name%profile%timestamp%bogus%db load 12%db 000102030405%db 060708090a0b%db print%infer 20 3%results%"
    b"infer 0%db 00%" + b"y" * 90 + b"%\xff%infer 2 0%"
)
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from esp32_agent.tiny.codec import Codec, Scale
from esp32_agent.tiny.device import TinyDevice
from tests.edge.tiny_parts import Port

class Files:
    def __init__(self):
        self.sent, self.answered = open("sent", "rb"), open("answered", "wb")
    def read(self, count):
        return self.sent.read(count)
    def write(self, data):
        return self.answered.write(data)

files = Files()
TinyDevice(Port(), files, Codec("ic01", 12, Scale(0.5, 1), Scale(0.25, -128)), "board").serve()
files.answered.close()
print("done")
"""


@pytest.mark.parametrize("where", ["cpython", pytest.param("micropython", marks=pytest.mark.slow)])
def test_it_answers_the_same_under_both_pythons(where: str, tmp_path: Path) -> None:
    """MicroPython with a heap of 128 KB, over file streams."""
    (tmp_path / "sent").write_bytes(SENT)
    (tmp_path / "program.py").write_text(PROGRAM.format(root=str(ROOT)))
    runs = ["python3"] if where == "cpython" else [str(tools.micropython()), "-X", "heapsize=128K"]
    done = subprocess.run([*runs, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stdout + done.stderr
    lines = (tmp_path / "answered").read_bytes().decode().split("\r\n")
    assert json.dumps(lines) == json.dumps(EXPECTED)


EXPECTED = [
    "m-timestamp-mode-performance", "m-lap-us-1000", "m-init-done", "m-ready",
    "m-name-dut-[board]", "m-ready",
    f"m-profile-[{FIRMWARE}]", "m-model-[ic01]", "m-ready",
    "m-lap-us-5000", "m-ready",
    "e-[Unknown command: bogus]", "m-ready",
    "m-[Expecting 12 bytes]", "m-ready", "m-ready", "m-load-done", "m-ready",
    "m-buffer-00-01-02-03-04-05-06-07", "m-buffer-08-09-0a-0b", "m-ready",
    "m-warmup-start-3", "m-warmup-done", "m-infer-start-20", "m-lap-us-12000", "m-lap-us-14000", "m-infer-done",
    "m-results-[0.000,0.250,0.500]", "m-ready", "m-results-[0.000,0.250,0.500]", "m-ready",
    "e-[Inference iterations must be >0]", "m-ready",
    "e-[All 12 bytes are loaded]", "m-ready",
    "e-[Command longer than 80 characters]", "m-ready",
    "e-[Command with a byte 0xff that is no text]", "m-ready",
    "m-warmup-start-0", "m-warmup-done", "m-infer-start-2", "m-lap-us-21000", "m-lap-us-22000", "m-infer-done",
    "m-results-[0.000,0.250,0.500]", "m-ready", "",
]  # fmt: skip
