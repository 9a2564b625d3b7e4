"""The runner `tflm-serial` and the firmware's own session, over a pseudo-terminal and over pipes."""

import json
import math
import os
import random
import subprocess
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esp32_agent.core.measuring import measure
from esp32_agent.port.base import Http, Port, Power, RunnerError
from esp32_agent.port.host.build import FileStorage, HostClock, SerialBoard
from esp32_agent.port.host.runners import TtyLine
from esp32_agent.port.inputs import FixedInput
from esp32_agent.port.micropython.wifi import Wired
from esp32_agent.port.serial_runner import SerialRunner

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
HEADERS = ROOT / "esp32_agent" / "firmware" / "serial" / "main"
SOURCE = Path(__file__).with_name("firmware.cpp")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-Wno-vla")


def build(folder: Path) -> Path:
    """The program, with the warnings of a careful compiler as errors and undefined behaviour as an abort."""
    program = folder / "firmware"
    sanitizers = ("-fsanitize=undefined,address", "-fno-sanitize-recover=all")
    options = ("-std=c++17", "-O1", "-g", *WARNINGS, *sanitizers, f"-I{HEADERS}")
    subprocess.run(["g++", *options, str(SOURCE), "-o", str(program)], check=True)
    return program


@contextmanager
def board(
    program: Path, input_bytes: int, output_bytes: int, latencies: str = "1000", fault: str = ""
) -> Iterator[TtyLine]:
    """A board on a line that a host opened."""
    own, device = os.openpty()
    tty.setraw(device)  # until the host opens the device, the terminal would echo what the board says
    arguments = [str(program), str(input_bytes), str(output_bytes), latencies, *([fault] if fault else [])]
    process = subprocess.Popen(arguments, stdin=own, stdout=own)
    line = TtyLine(os.ttyname(device), 921_600)
    try:
        yield line
    finally:
        line.close()
        process.kill()
        process.wait()
        os.close(own)
        os.close(device)


def exchange(program: Path, lines: bytes, *arguments: str) -> list[bytes]:
    """All that the board says to these lines, its first words left out."""
    done = subprocess.run([str(program), *arguments], input=lines, capture_output=True, check=True)
    return done.stdout.splitlines()[1:]


@pytest.fixture(scope="session")
def firmware(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once."""
    return build(tmp_path_factory.mktemp("firmware"))


def made_up_output(data: bytes, count: int) -> bytes:
    """What the made-up model answers."""
    return bytes((sum(data) + place) % 256 for place in range(count))


def answer_of(program: Path, *requests: str, latencies: str = "1000", fault: str = "") -> list[dict]:
    """The objects that a board with an input of 8 bytes and an output of 4 answers."""
    arguments = ("8", "4", latencies, *([fault] if fault else []))
    return [json.loads(line) for line in exchange(program, "\n".join([*requests, ""]).encode(), *arguments)]


def run_twice(runner: SerialRunner) -> None:
    """Two inferences, and the output of the second."""
    for _ in range(2):
        runner.invoke()
    runner.output()


def test_a_model_runs_at_the_other_end(firmware: Path) -> None:
    data = random.Random(1).randbytes(27_648)
    with board(firmware, 27_648, 300, "54123,54001") as line:
        runner = SerialRunner(line)
        runner.set_input(data)
        assert [runner.invoke(), runner.invoke()] == [54_123, 54_001]
        assert runner.output() == made_up_output(data, 300)
        assert (runner.input_bytes, runner.output_bytes, runner.arena_bytes) == (27_648, 300, 210_288)
        assert (runner.name, runner.model_sha256) == ("tflm-serial", "a" * 64)


@pytest.mark.parametrize("fault", ["noise", "silent"])
def test_what_a_boot_loader_prints_is_skipped_and_a_board_that_boots_is_waited_for(
    firmware: Path, fault: str
) -> None:
    with board(firmware, 8, 4, fault=fault) as line:
        runner = SerialRunner(line)
        runner.set_input(b"abcdefgh")
        assert runner.invoke() == 1000


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("fail", "The board refused invoke: An operator failed."),
        ("restart", "The board on the serial line restarted."),
        ("damage", "The board has another input than was sent: the serial line loses bytes."),
        ("output", "The output was damaged on the serial line."),
    ],
)
def test_a_fault_is_said(firmware: Path, fault: str, sentence: str) -> None:
    with board(firmware, 8, 4, fault=fault) as line:
        runner = SerialRunner(line)
        runner.set_input(b"abcdefgh")
        with pytest.raises(RunnerError) as error:
            run_twice(runner)
    assert str(error.value) == sentence


def test_a_line_without_a_board_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esp32_agent.port.serial_runner.READY_MS", 1000)
    own, device = os.openpty()
    line = TtyLine(os.ttyname(device), 115_200)
    with pytest.raises(RunnerError, match="does not answer"):
        SerialRunner(line)
    line.close()
    os.close(own)
    os.close(device)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"id":1,"do":"sing"}', "There is no such command"),
        ('{"id":1,"do":"input","offset":7,"data":"0000"}', "The data reaches beyond the input."),
        ('{"id":1,"do":"input","offset":9,"data":""}', "The data reaches beyond the input."),
        ('{"id":1,"do":"input","offset":0,"data":"000"}', "The data reaches beyond the input."),
        ('{"id":1,"do":"input","offset":0,"data":"0g"}', "The data is not hexadecimal."),
        ('{"id":1,"do":"output","offset":2,"size":3}', "There are no such bytes of the output."),
        ('{"id":1,"do":"output","offset":4294967295,"size":2}', "There are no such bytes of the output."),
        ('{"id":1,"do":"measure","count":0}', "The count must be 1 to 1000000"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_its_id(
    firmware: Path, line: str, sentence: str
) -> None:
    (answer,) = answer_of(firmware, line)
    assert answer["id"] == 1
    assert answer["error"].startswith(sentence)


@pytest.mark.parametrize(
    "line",
    [
        "hello", "{", "[]", '{"id":1', '{"id":1,}', '{"id":1}}', '{"id":-1,"do":"info"}',
        '{"id":4294967296,"do":"info"}',
        '{"id":0,"do":"info"}', '{"do":"info"}', '{"id":1,"do":"a\\"b"}', '{"id":1,"do":"0123456789abcdef"}',
        '{"id":1.5,"do":"info"}', '{"id":1,"do":{"a":1}}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_is_refused_and_the_next_one_served(firmware: Path, line: str) -> None:
    refused, served = answer_of(firmware, line, '{"id":2,"do":"invoke"}')
    assert refused == {"id": 0, "error": "The line is not a request."}
    assert served["us"] == 1000


def test_random_bytes_never_break_the_session(firmware: Path) -> None:
    chance = random.Random(3)
    noise = b"\n".join(bytes(chance.choice(b'{}":,0129adio\\ \xff') for _ in range(60)) for _ in range(2000))
    answers = exchange(firmware, noise + b'\n{"id":9,"do":"invoke"}\n', "8", "4", "1000")
    assert json.loads(answers[-1])["id"] == 9


@pytest.mark.parametrize("count", [1, 10, 11, 63, 64, 661, 662, 2000])
def test_the_boards_statistics_follow_the_engines_rule(firmware: Path, count: int) -> None:
    chance = random.Random(count)
    latencies = [int(math.exp(chance.gauss(10, 1))) for _ in range(count)]
    request = json.dumps({"id": 1, "do": "measure", "count": count, "warmup": 3})
    given = ",".join(str(latency) for latency in [7, 7, 7, *latencies])
    (answer,) = answer_of(firmware, request, latencies=given)
    assert (answer["count"], answer["total_us"], answer["min_us"]) == (count, sum(latencies), min(latencies))
    for percent, fewest in ((50, 11), (90, 64), (99, 662)):
        measured = answer[f"p{percent}_us"]
        if count < fewest:
            assert measured is None
        else:
            exact = sorted(latencies)[-(-count * percent // 100) - 1]
            assert exact <= measured <= exact + exact // 128


def test_windows_count_the_boards_time_and_not_the_lines(firmware: Path, tmp_path: Path) -> None:
    clock = HostClock()
    with board(firmware, 8, 4, "54000") as line:
        runner = SerialRunner(line)
        port = Port(
            clock=clock, network=Wired(), http=Http(), storage=FileStorage(tmp_path), power=Power(), runner=runner,
            camera=FixedInput(bytes(8)), board=SerialBoard("esp32s3-n16r8", runner),
        )  # fmt: skip
        found = measure(port, seconds=1, windows=2, warmup=1)
    assert [(window.count, window.total_us) for window in found.windows] == [(19, 1_026_000)] * 2
    assert (found.latency.min_us, found.latency.max_us) == (54_000, 54_000)
