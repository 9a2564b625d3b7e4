"""config.json: read as written, and refused in one sentence; python -m esp32_agent says it with exit status 2. And
storages: what base promises, a power cut (the process is killed), and a medium that is full."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from esp32_agent.config import read
from esp32_agent.main import main
from esp32_agent.port.base import Storage
from esp32_agent.port.host.build import FileStorage
from esp32_agent.port.micropython.board import FlashStorage
from esp32_agent.section import ConfigError
from tests.edge.tools import micropython

ROOT = Path(__file__).resolve().parents[3]
LEAST: dict[str, Any] = {
    "url": "https://optigpu.example.org",
    "board": "esp32s3-n16r8",
    "model": "model.tflite",
    "runner": {"kind": "tflm-host"},
}


def written(folder: Path, document: object) -> str:
    """The path of a configuration."""
    path = folder / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_the_example_is_a_configuration() -> None:
    config = read(str(ROOT / "esp32_agent" / "config.example.json"))
    assert config.wifi.ssid == "my network"
    assert config.power.sensor == "ina226"
    assert config.model == str(ROOT / "esp32_agent" / "model.tflite")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"url": None}, "`url` is missing."),
        ({"url": "optigpu.org"}, "`url` begins with neither http:// nor https://: optigpu.org"),
        (
            {"url": "http://optigpu.org"},
            "`url` is plain http: use https, or set `allow_http` to true in a network",
        ),
        (
            {"invite": "ABCD"},
            "`invite` must look like ABCD-EFGH-JKMN-PQRS: four groups of four letters and digits.",
        ),
        ({"board": "My Board"}, "`board` must be a board's id such as esp32s3-n16r8"),
        ({"name": "käfer"}, "`name` must have at most 64 characters, all of ASCII."),
        ({"windows": 0}, "`windows` must be a whole number from 1 to 64."),
        ({"warmup": True}, "`warmup` must be a whole number from 0 to 1000."),
        ({"period": 60}, "`period` is unknown: the members here are allow_http, board, ca,"),
        ({"wifi": {"password": "x"}}, "`wifi.ssid` is missing."),
        ({"runner": {"kind": "torch"}}, "`runner.kind` must be one of tflm-native, tflm-serial, tflm-host,"),
        (
            {"runner": {"kind": "tflm-host", "arena": 1}},
            "`runner.arena` is unknown: the members here are arena_bytes,",
        ),
        ({"power": {"sensor": "ina220"}}, "`power.sensor` must be one of none, ina219, ina226."),
        (
            {"power": {"sensor": "ina226", "address": 1}},
            "`power.address` must be a whole number from 64 to 79.",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    path = written(tmp_path, LEAST | change)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {sentence}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"])
def test_this_machine_is_reached_without_tls(tmp_path: Path, url: str) -> None:
    assert read(written(tmp_path, LEAST | {"url": url})).url == url


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "is not JSON: "), ("[]", ": The file must hold one object."), ("", "is not JSON")],
)
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(written(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({"windows": 0}, 2, "`windows` must be"),
        ({"runner": {"kind": "tflm-native"}}, 2, "`runner.kind` is tflm-native; this machine has tflm-host,"),
        ({"runner": {"kind": "simulator"}, "ca": "none.pem"}, 2, "The certificates of `ca` ("),
        ({"runner": {"kind": "simulator"}, "power": {"sensor": "ina219"}}, 2, "This machine has no I2C bus"),
        (
            {"runner": {"kind": "simulator"}, "input": {"source": "camera"}},
            2,
            "`input.source` is camera; this machine",
        ),
        ({"runner": {"kind": "simulator"}, "input": {"source": "folder"}}, 2, "`input.path` is missing"),
        ({"runner": {"kind": "simulator"}, "golden": "none.bin"}, 1, "The golden inputs "),
        ({"runner": {"kind": "simulator"}, "model": "none.tflite"}, 1, "The model "),
        ({"runner": {"kind": "simulator"}, "model": "config.json"}, 1, "The file "),
        (
            {"runner": {"kind": "tflm-serial", "device": "/dev/null"}},
            1,
            "The device /dev/null is not a serial line",
        ),
        (
            {"runner": {"kind": "tflm-serial", "device": "/dev/none"}},
            1,
            "The serial line /dev/none cannot be opened",
        ),
    ],
)
def test_the_command_refuses_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], status: int, sentence: str
) -> None:
    (tmp_path / "model.tflite").write_bytes(b"\0\0\0\0TFL3" + bytes(100))
    assert main(["--config", written(tmp_path, LEAST | change)]) == status
    printed = capsys.readouterr().out
    assert sentence in printed
    assert printed.count("\n") == 1


SCRIPT = Path(__file__).with_name("on_device.py")
LINE = 7


@pytest.fixture(params=[FileStorage, FlashStorage], ids=["host", "micropython"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Both classes, here under CPython."""
    folder = tmp_path / "deep" / "data"
    made: Storage = request.param(folder if request.param is FileStorage else str(folder))
    return made


@pytest.fixture(params=["cpython", "micropython"])
def command(request: pytest.FixtureRequest) -> list[str]:
    """Runs the script in an interpreter."""
    interpreter = [sys.executable] if request.param == "cpython" else [str(micropython())]
    return [*interpreter, str(SCRIPT)]


def environment() -> dict[str, str]:
    return os.environ | {"MICROPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}


def test_a_file_is_replaced_read_in_part_and_removed(storage: Storage) -> None:
    storage.replace("state", b"old")
    storage.replace("state", b"0123456789")
    assert storage.read("state") == b"0123456789"
    assert storage.read("state", 3, 4) == b"3456"
    assert storage.read("state", 8, 10) == b"89"
    assert storage.read("state", 20, 10) == b""
    storage.remove("state")
    assert storage.read("state") is None


def test_a_log_grows_and_is_cut(storage: Storage) -> None:
    storage.append("log", b"a" * 3000)
    storage.append("log", b"b" * 3000)
    assert storage.size("log") == 6000
    storage.truncate("log", 3001)
    storage.append("log", b"c")
    assert storage.read("log") == b"a" * 3000 + b"bc"


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 17, 60, 61])
def test_a_power_cut_leaves_old_or_new_content_and_a_log_without_gaps(
    command: list[str], tmp_path: Path, after: int
) -> None:
    process = subprocess.Popen(
        [*command, "churn", str(tmp_path / "data")], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(after):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = after + len(process.stdout.readlines())
    kept = FileStorage(tmp_path / "data")
    state, log = kept.read("state") or b"", kept.read("log") or b""
    assert len(state) == 400 * LINE
    assert state == state[:LINE] * 400
    assert int(state[:LINE]) in (done, done + 1)
    lines = log.split(b"\n")
    assert [int(line) for line in lines[:-1]] == list(range(1, len(lines)))
    assert len(lines) - 1 in (done - 1, done, done + 1)
    kept.replace("state", b"goes on")
    assert kept.read("state") == b"goes on"


@pytest.mark.slow
def test_a_full_medium_is_said_and_loses_nothing(command: list[str], tmp_path: Path) -> None:
    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = subprocess.run(
        [*command, "full", str(tmp_path / "data")],
        env=environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=False, preexec_fn=little_room,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines() == [
        "replace True", "old True 0", "append True", "kept True True", "again True 9500",
    ]  # fmt: skip


def test_a_part_that_did_not_fit_is_cut_off_on_a_host(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.append("log", b"whole")
    with contextlib.ExitStack() as stack:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
        with pytest.raises(Exception, match="The storage is full"):
            storage.append("log", b"torn in two")
    assert storage.read("log") == b"whole"
