"""The backend tensorflow runs the float network that a .tflite file is made of."""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.tensorflow import TensorFlowBackend
from optigpu.hardware import probe
from tests.pages import ROOT

PROGRAM = Path(__file__).with_name("tensorflow_passes.py")


@pytest.fixture(scope="module")
def told(edge: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("networks")
    for name in ("tiny", "vector", "dynamic"):
        shutil.copy(models / f"{name}.keras", folder)
    whole = (folder / "tiny.keras").read_bytes()
    (folder / "damaged.keras").write_bytes(whole[: len(whole) // 2])
    paths = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    variables = os.environ | {
        "PYTHONPATH": paths,
        "OPTIGPU_MODELS_DIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([edge, PROGRAM, folder], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_its_scores_are_those_of_keras(told: dict[str, Any]) -> None:
    tiny = told["tiny"]
    assert tiny["apart"] < 1e-5
    assert tiny["apart_xla"] < 1e-5
    assert tiny["chosen"]
    assert tiny["problem"] is None
    assert tiny["xla"] == [False, True]


@pytest.mark.slow
def test_it_counts_weights_and_operations(told: dict[str, Any]) -> None:
    assert told["tiny"]["parameters"]
    assert told["tiny"]["flops"] == 2 * 26_688, "as test_conversion.py counts by hand"


@pytest.mark.slow
def test_what_it_cannot_run_is_refused_with_the_reason(told: dict[str, Any]) -> None:
    assert "square images of a fixed size" in told["vector"]
    assert "square images of a fixed size" in told["dynamic"]
    assert "cannot load damaged.keras" in told["damaged"]
    assert "There is no file path:absent.keras" in told["absent"]


def test_where_it_is_missing_the_command_that_helps_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without = probe().model_copy(update={"software": {}})
    assert "optigpu engines install tensorflow" in str(TensorFlowBackend().missing(without))
