"""What cannot be converted ends with one sentence and the next step, and leaves nothing behind."""

import signal
import subprocess
import time
import venv
from pathlib import Path

import numpy as np
import psutil
import pytest

from optigpu.edge.convert import ConversionRequest, Data, check_request
from optigpu.edge.tflite import read_tflite
from optigpu.vocabulary import SpecError
from tests.edge.convert.conftest import RANDOM, Convert, command_line, environment, leaves_nothing, said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Name one network: --model mobilenet_v2, a .keras file or"),
        (("--model", "mobilnet_v2", *RANDOM), "Unknown model 'mobilnet_v2'. Did you mean mobilenet_v2?"),
        (
            ("--model", "mobilenet_v2"),
            "Calibration needs representative data: give --images FOLDER or --npz FILE.",
        ),
        (("--model", "mobilenet_v2", "--npz", "/none.npz"), "--npz /none.npz: there is no such file."),
        (("/none.keras", *RANDOM), "/none.keras: there is no such file or folder."),
        ((__file__, *RANDOM), f"{__file__} is not a model that is read; give a .keras file"),
        (("/none.keras", "--alpha", "1.0", *RANDOM), "--alpha: only mobilenet_v2 has it"),
        (("--model", "mobilenet_v2", "--input", "8", *RANDOM), "side: 8 is too small; the least is 32."),
        (("--model", "mobilenet_v2", "--name", "a b", *RANDOM), "--name a b: write letters, digits and _"),
        (("--model", "mobilenet_v2", "--timeout", "soon", *RANDOM), "--timeout soon: write seconds"),
        (
            ("--model", "mobilenet_v2", "--weights", "imagenet", "--input", "100", *RANDOM),
            "ImageNet's weights exist",
        ),
    ],
)
def test_a_wrong_request_is_one_sentence_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    from optigpu.cli import main

    with pytest.raises(SystemExit) as exit_:
        main(["convert", *arguments, "--output", str(tmp_path / "out"), "--python", "/none/python"])
    assert exit_.value.code == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_keras_file_and_one_without_its_scale_are_refused(tmp_path: Path) -> None:
    from optigpu.edge.convert import NetworkFile

    path = tmp_path / "net.keras"
    path.write_bytes(b"PK\x03\x04 half an archive")
    request = ConversionRequest(
        network=NetworkFile(path=path), data=Data(kind="random"), output=tmp_path / "out"
    )
    with pytest.raises(SpecError, match=r"is not a \.keras file, which is a zip archive, or it is truncated"):
        check_request(request)
    np.savez(tmp_path / "net.npz", a=np.zeros(1))
    (tmp_path / "net.npz").rename(path)
    images = request.model_copy(update={"data": Data(kind="images", path=tmp_path)})
    with pytest.raises(SpecError, match="Say with --pixels how the network was trained"):
        check_request(images)


@pytest.mark.long
def test_a_python_without_tensorflow_is_told_what_to_install(convert: Convert, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    ran = convert("--model", "mobilenet_v2", *RANDOM, python=tmp_path / "bare" / "bin" / "python")
    assert (ran.status, leaves_nothing(ran)) == (1, True)
    assert said(ran).startswith(
        "Converting needs TensorFlow, LiteRT and TFLite Micro, and this Python lacks "
    )
    assert 'pip install -e ".[hardware]"' in said(ran)


def test_a_python_that_is_not_there_is_one_sentence(convert: Convert) -> None:
    ran = convert("--model", "mobilenet_v2", *RANDOM, python=Path("/none/python"))
    assert (ran.status, leaves_nothing(ran)) == (2, True)
    assert said(ran) == "--python /none/python cannot be started: No such file or directory."


def started(output: Path, edge: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A conversion that takes minutes, in its own process."""
    command = command_line(
        "--model", "mobilenet_v2", *RANDOM, "--output", output, "--python", edge, *arguments
    )
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())


def child_of(parent: "subprocess.Popen[str]") -> psutil.Process:
    """The process that has TensorFlow, once it is there."""
    for _ in range(200):
        if children := psutil.Process(parent.pid).children():
            return children[0]
        time.sleep(0.05)
    raise AssertionError("no process was started")


def gone(process: psutil.Process) -> bool:
    for _ in range(100):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_a_process_that_is_killed_is_one_sentence(edge: Path, tmp_path: Path) -> None:
    parent = started(tmp_path / "out", edge)
    child_of(parent).kill()
    _, err = parent.communicate(timeout=30)
    assert parent.returncode == 1
    assert "Error: The conversion's process was killed by signal 9 (Killed) while " in err
    assert "nothing was written. Memory may have been short." in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_conversion_that_takes_too_long_is_ended(edge: Path, tmp_path: Path) -> None:
    parent = started(tmp_path / "out", edge, "--timeout", "0.5s")
    child = child_of(parent)
    _, err = parent.communicate(timeout=30)
    assert (parent.returncode, gone(child)) == (1, True)
    assert "Error: The conversion took longer than --timeout; it was ended, and nothing was written." in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_conversion_that_is_stopped_leaves_nothing(edge: Path, tmp_path: Path) -> None:
    parent = started(tmp_path / "out", edge)
    child = child_of(parent)
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=30)
    assert (parent.returncode, gone(child)) == (128 + signal.SIGTERM, True)
    assert "The conversion was stopped, and nothing was written." in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_conversion_whose_parent_is_killed_ends_too(edge: Path, tmp_path: Path) -> None:
    parent = started(tmp_path / "out", edge)
    child = child_of(parent)
    time.sleep(0.5)
    parent.kill()
    parent.communicate(timeout=30)
    assert gone(child)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content", [b"", b"TFL3", b"\x1c\0\0\0TFL3", b"<html>captive portal</html>", bytes(64)]
)
def test_a_file_that_is_no_model_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(content)
    with pytest.raises(SpecError, match="TensorFlow Lite model"):
        read_tflite(path)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_tflite(tmp_path / "none.tflite")
