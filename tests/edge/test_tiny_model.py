"""The host agent with the real TFLite Micro behind it, driven by the runner's side over a pseudo-terminal."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from optigpu.edge.tiny.profiles import labels_of, profile_of, read_samples
from optigpu.edge.tiny.session import measure_accuracy, open_session
from tests.edge.tiny_device import micro_device
from tests.edge.tools import edge_python
from tests.pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> Path:
    return edge_python()


@pytest.fixture(scope="module")
def models(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that make_tiny_models.py writes."""
    folder = tmp_path_factory.mktemp("models")
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    program = Path(__file__).with_name("make_tiny_models.py")
    subprocess.run([python, program, folder], check=True, capture_output=True, env=quiet)
    return folder


def test_its_results_are_those_of_the_reference_kernels(python: Path, models: Path) -> None:
    """To the three decimals of the protocol, after any number of inferences."""
    samples = read_samples(models / "ic01.npz", profile_of("ic01"))
    with np.load(models / "ic01.npz") as arrays:
        expected = arrays["results"]
    with micro_device(python, models / "ic01.tflite") as port, open_session(port) as session:
        assert (session.view.model, session.view.name) == ("ic01", "optigpu")
        for sample, wanted in zip(samples, expected, strict=True):
            session.device.load(sample.segments[0])
            assert session.device.buffer() == sample.segments[0]
            for count in (1, 7):
                found = session.device.infer(count, 2)
                assert found.results == pytest.approx(wanted.tolist(), abs=0.0006)


def test_anomalies_are_judged_by_the_area_under_the_curve(python: Path, models: Path) -> None:
    """Its inputs are floats, and it answers how far its output is from them."""
    path = models / "ad01.npz"
    samples = read_samples(path, profile_of("ad01"))
    with (
        micro_device(python, models / "ad01.tflite", "--profile", "ad01") as port,
        open_session(port) as session,
    ):
        found = measure_accuracy(session, samples, labels_of(samples, path))
        session.device.load(samples[-1].segments[0])
        assert len(session.device.infer(1, 0).results) == 1
    assert (found.metric, found.value) == ("auc", 1.0)


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (b"<html>", (), "Error: "),
        (None, ("--arena-bytes", "1024"), "Error: TFLite Micro cannot load"),
        (None, ("--arena-bytes", "64"), "an arena has 512 bytes or more"),
        (None, ("--profile", "sww01"), "invalid choice: 'sww01'"),
        (None, ("--port", "/dev/none-there"), "Error: [Errno 2]"),
        (None, ("--port", "/dev/null", "--baud", "12345"), "Error: this system has no baud rate of 12345"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    content: bytes | None, options: tuple[str, ...], sentence: str, python: Path, models: Path, tmp_path: Path
) -> None:
    model = models / "ic01.tflite"
    if content is not None:
        model = tmp_path / "bad.tflite"
        model.write_bytes(content)
    command = [str(python), "-m", "esp32_agent.tiny", "--model", str(model), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
