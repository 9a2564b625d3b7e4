"""The runner's side against real devices on pseudo-terminals: what it measures, and every fault is one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.edge.tiny.link import (
    AnswerError,
    Device,
    Link,
    PortError,
    ResetError,
    SerialPort,
    SilenceError,
    TinyError,
)
from optigpu.edge.tiny.profiles import PROFILES, read_samples
from optigpu.edge.tiny.session import (
    Rules,
    area,
    measure_accuracy,
    measure_performance,
    open_session,
    quality_of,
)
from optigpu.vocabulary import SpecError
from tests.edge.tiny_device import CLASSES, INPUT_BYTES, small_device

SILENCE_S = 0.4
ZEROS = bytes(INPUT_BYTES)


def driven(port: str) -> Device:
    device = Device(Link(SerialPort(port)), SILENCE_S, SILENCE_S)
    device.identify()
    return device


def test_the_device_says_who_it_is_and_holds_what_was_loaded() -> None:
    with small_device("--profile", "kws01") as port, SerialPort(port) as opened:
        device = Device(Link(opened))
        identity = device.identify()
        assert (identity.name, identity.model) == ("small", "kws01")
        assert identity.firmware.startswith("ULPMark")
        data = bytes(range(INPUT_BYTES))
        device.load(data)
        assert device.buffer() == data
        found = device.infer(3, 1)
        assert (found.count, found.results) == (3, (128.0, 129.0, 130.0, 131.0))
        assert found.elapsed_us > 0


def test_performance_is_the_median_of_runs_that_are_long_enough() -> None:
    with small_device("--seconds", "0.004") as port, open_session(port) as session:
        sample = None
        session = type(session)(session.device, session.link, _short(session.profile), session.view)
        found = measure_performance(session, sample, Rules(seconds=0.15, inferences=10, runs=3))
    assert len(found.runs) == 3
    assert all(run.elapsed_s >= 0.15 and run.inferences >= 10 for run in found.runs)
    assert found.inferences_per_s == sorted(run.per_second for run in found.runs)[1]
    assert found.clock_agrees
    assert found.noise_lines == 0


def _short(profile: Any) -> Any:
    """The profile with an input as small as the small model's."""
    return profile.model_copy(update={"input_bytes": INPUT_BYTES, "warmup": 1})


def test_a_clock_that_lies_is_noticed() -> None:
    with small_device("--seconds", "0.01", "--fast-clock") as port, open_session(port) as session:
        short = type(session)(session.device, session.link, _short(session.profile), session.view)
        found = measure_performance(short, None, Rules(seconds=0.5, inferences=10, runs=1))
    assert not found.clock_agrees


def test_accuracy_is_top_1_over_labelled_inputs(tmp_path: Path) -> None:
    inputs = np.random.default_rng(1).integers(0, 256, (8, INPUT_BYTES), dtype=np.uint8)
    # The small model answers the input's first bytes, 128 less as the profile has it.
    labels = inputs[:, :CLASSES].argmax(axis=1)
    labels[0] = (labels[0] + 1) % CLASSES
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=labels)
    samples = read_samples(tmp_path / "data.npz", PROFILES["ic01"])
    with small_device() as port, open_session(port, profile="ic01") as session:
        found = measure_accuracy(session, samples, [int(label) for label in labels])
    assert (found.samples, found.value, found.reached) == (8, 7 / 8, True)


@pytest.mark.parametrize("fault", ["noise", "glued_noise", "garbled_load_once"])
def test_what_can_be_lived_with_changes_nothing(fault: str) -> None:
    with small_device("--fault", fault) as port, SerialPort(port) as opened:
        link = Link(opened)
        device = Device(link, SILENCE_S * 3, SILENCE_S * 3)
        device.identify()
        device.load(bytes(range(INPUT_BYTES)))
        assert device.infer(2, 0).results == (0.0, 1.0, 2.0, 3.0)
        assert (link.noise > 0) == ("noise" in fault)


FAULTS: dict[str, tuple[type[TinyError], str]] = {
    "silence_in_infer": (SilenceError, r"is silent for 0\.4 s after `infer 2 0`: check the port"),
    "half_line": (SilenceError, r"after `infer 2 0`, in the middle of a line of 6 bytes: check"),
    "reset": (ResetError, r"started again while it answered `infer 2 0`"),
    "wrong_count": (AnswerError, r"was asked for 2 inferences and began 3\."),
    "one_lap": (AnswerError, r"An inference has two times; the device gave 1\."),
    "no_numbers": (AnswerError, r"The device's result is no list of numbers: nan,,x\."),
    "endless": (AnswerError, r"has a line of more than 65536 bytes"),
    "stutter": (SilenceError, r"is silent for 0\.4 s after `infer 2 0`"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_one_sentence(fault: str) -> None:
    kind, sentence = FAULTS[fault]
    with small_device("--fault", fault) as port:
        device = driven(port)
        device.load(ZEROS)
        with pytest.raises(kind, match=sentence):
            device.infer(2, 0)


def test_a_load_that_is_never_complete_is_an_error() -> None:
    with small_device("--fault", "no_load_done") as port:
        device = driven(port)
        with pytest.raises(
            AnswerError, match="cannot be loaded: the device does not say that it is complete"
        ):
            device.load(ZEROS)


def test_a_model_that_fails_and_a_device_in_energy_mode() -> None:
    with small_device("--fails-after", "1") as port:
        device = driven(port)
        device.load(ZEROS)
        with pytest.raises(AnswerError, match="The device cannot infer: invoke failed  status 1"):
            device.infer(3, 0)
    with small_device("--energy") as port:
        device = driven(port)
        device.load(ZEROS)
        with pytest.raises(AnswerError, match="gives no times: it is in energy mode"):
            device.infer(3, 0)


def test_a_board_that_restarts_once_costs_one_sample_another_try(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", inputs=np.eye(4, INPUT_BYTES, dtype=np.uint8), labels=np.arange(4))
    samples = read_samples(tmp_path / "data.npz", PROFILES["ic01"])
    with small_device("--fault", "reset_once") as port, open_session(port, silence_s=SILENCE_S) as session:
        assert measure_accuracy(session, samples, [0, 1, 2, 3]).value == 1.0


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("/dev/none-there", "cannot be opened: No such file"), ("/dev/null", "/dev/null is not a serial port")],
)
def test_a_port_that_is_none_is_said(path: str, sentence: str) -> None:
    with pytest.raises(PortError, match=sentence):
        SerialPort(path)


def test_nobody_there_is_silence_and_a_device_that_goes_is_said() -> None:
    master, other = os.openpty()
    with SerialPort(os.ttyname(other)) as port:
        with pytest.raises(SilenceError, match=r"is silent for 0\.2 s after `name`"):
            Device(Link(port), 0.2).identify()
        os.close(other)
        os.close(master)
        with pytest.raises(PortError, match="has gone"):
            Link(port).ask("name", 0.2)


def test_a_device_that_takes_no_bytes_is_silence() -> None:
    master, other = os.openpty()
    with (
        SerialPort(os.ttyname(other)) as port,
        pytest.raises(SilenceError, match=r"takes no bytes for 0\.2 s"),
    ):
        port.write(bytes(10**6), 0.2)
    os.close(other)
    os.close(master)


def test_the_area_under_the_curve_counts_pairs() -> None:
    random = np.random.default_rng(3)
    labels, scores = random.integers(0, 2, 60).tolist(), random.integers(0, 9, 60).tolist()
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a, first in zip(scores, labels, strict=True)
        for b, second in zip(scores, labels, strict=True)
        if first and not second
    ]
    assert area(labels, scores) == pytest.approx(sum(pairs) / len(pairs))
    assert area([0, 1], [0.1, 0.2]) == 1.0
    with pytest.raises(SpecError, match="needs labels 0"):
        area([1, 1], [0.1, 0.2])
    assert quality_of(PROFILES["ad01"], [0, 1], [(0.5,), (0.1,)]) == 0.0
    with pytest.raises(SpecError, match=r"The labels are 0 to 9; the device knows 2 classes"):
        quality_of(PROFILES["ic01"], [0, 9], [(0.5, 0.5), (0.1, 0.9)])


def test_a_folder_of_the_open_runner_is_read_in_segments(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(10)))
    (tmp_path / "b.bin").write_bytes(bytes(range(4)))
    (tmp_path / "y_labels.csv").write_text("a.bin, 2, 1, 4, 2\nb.bin, 2, 0\n")
    first, second = read_samples(tmp_path, PROFILES["ad01"])
    assert first.segments == (
        bytes([0, 1, 2, 3]),
        bytes([2, 3, 4, 5]),
        bytes([4, 5, 6, 7]),
        bytes([6, 7, 8, 9]),
    )
    assert (first.label, second.segments, second.label) == (1, (bytes(range(4)),), 0)


BAD_FOLDERS = {
    "a.bin,2": "line 1 of .* is not: file, classes, class",
    "a.bin,2,x": "line 1 of .* is not: file",
    "../b,2,1": "names ../b, which lies outside of the folder",
    "none,2,1": "names none, which cannot be read: No such file",
    "a.bin,2,1,4,0": "the stride must not be 0",
    "a.bin,2,1,400,2": "an input must have 1 to 27648 bytes",
    "": "holds no samples",
}


@pytest.mark.parametrize("text", BAD_FOLDERS)
def test_a_folder_that_is_wrong_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(10))
    (tmp_path / "y_labels.csv").write_text(text)
    with pytest.raises(SpecError, match=BAD_FOLDERS[text]):
        read_samples(tmp_path, PROFILES["ic01"])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "optigpu", "tiny", *arguments], capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    inputs = np.eye(4, INPUT_BYTES, dtype=np.uint8)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=np.arange(4))
    np.savez(tmp_path / "wrong.npz", inputs=inputs, labels=(np.arange(4) + 1) % 4)
    rules = ("--seconds", "0.1", "--runs", "2")
    with small_device("--seconds", "0.001") as port:
        table = command("--port", port, "--inputs", str(tmp_path / "data.npz"), *rules)
        assert table.returncode == 0, table.stderr
        assert "MLPerf Tiny's ic01, performance, on small" in table.stdout
        assert "Median: " in table.stdout
        good = command(
            "--port", port, "--mode", "accuracy", "--inputs", str(tmp_path / "data.npz"), "--format", "json"
        )
        assert (good.returncode, json.loads(good.stdout)["value"]) == (0, 1.0), good.stderr
        bad = command("--port", port, "--mode", "accuracy", "--inputs", str(tmp_path / "wrong.npz"))
        assert (bad.returncode, "no" in bad.stdout.split()) == (3, True), bad.stderr
