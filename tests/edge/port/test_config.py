"""config.json: read as written, and refused in one sentence; python -m esp32_agent says it with exit status 2."""

import json
from pathlib import Path
from typing import Any

import pytest

from esp32_agent.config import read
from esp32_agent.main import main
from esp32_agent.section import ConfigError

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
