"""A worker for one GPU by its UUID: what it hides, and what it says when the GPU is not there.

The driver library is made up, so that this runs without a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optigpu.store.database import default_url
from tests.drivers.nvml import ROOT, build
from tests.service.processes import Processes, watched_processes
from tests.service.workers import migrated

SHOW = """
import os, sys
from worker.__main__ import show_only
show_only(sys.argv[1])
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def asked(uuid: str, library: Path, mode: str = "") -> tuple[str, str]:
    """What CUDA may see afterwards, and the last line of an error."""
    environment = os.environ | {"FAKE_NVML": mode, "LD_LIBRARY_PATH": str(library)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, uuid], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "mode", "shown"),
    [
        ("GPU-made-up", "", "GPU-made-up"),
        ("GPU-m", "", "GPU-made-up"),
        ("MIG-made-up-2", "mig", "MIG-made-up-2"),
    ],
)
def test_every_other_gpu_is_hidden(library: Path, named: str, mode: str, shown: str) -> None:
    assert asked(named, library, mode) == (shown, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "mode", "sentence"),
    [
        ("GPU-other", "", "This machine has no GPU GPU-other; it has: GPU-made-up (NVIDIA Made-up)."),
        ("MIG-made-up", "mig", "Several GPUs begin with MIG-made-up: MIG-made-up-0 "),
        ("GPU-made-up", "not_loaded", "The NVIDIA driver is not loaded; load it and run again."),
    ],
)
def test_a_gpu_that_is_not_there_is_a_sentence(library: Path, named: str, mode: str, sentence: str) -> None:
    shown, error = asked(named, library, mode)
    assert shown == ""
    assert sentence in error


def refusal(processes: Processes, *arguments: str, **variables: str) -> str:
    assert processes.start("worker", *arguments, **variables).wait(60) == 2
    return processes.printed()


@pytest.mark.slow
def test_a_container_without_nvml_is_said_by_the_worker(tmp_path: Path) -> None:
    """In the image's terms: the library of the driver is not there, since nobody reserved a GPU for the container."""
    hidden = {
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "LD_LIBRARY_PATH": str(build(tmp_path)),
        "FAKE_NVML": "absent",
    }
    with migrated(default_url(tmp_path)), watched_processes(tmp_path, hidden) as processes:
        said = refusal(processes, "--device", "cuda", "--gpu", "GPU-5f1c")
    assert said == (
        "python -m worker: This machine has no NVIDIA driver library (libnvidia-ml.so.1); install the driver, or "
        "make it available in the container.\n"
    )


@pytest.mark.slow
def test_a_gpu_for_a_worker_on_the_cpu_is_refused(tmp_path: Path) -> None:
    with watched_processes(tmp_path, {"OPTIGPU_DATA_DIR": str(tmp_path)}) as processes:
        assert "leave one of them out" in refusal(processes, "--device", "cpu", "--gpu", "GPU-5f1c")
