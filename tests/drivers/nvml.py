"""Builds the made-up driver library, and asks it in a separate process, since a process loads such a library once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, *options: str) -> Path:
    """The folder, with `libnvidia-ml.so.1` in it. `options` are the compiler's."""
    source, library = Path(__file__).with_name("nvml.cpp"), folder / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", *options, str(source), "-o", str(library)], check=True)
    return folder


def ask(library: Path | None, question: str, mode: str = "", after: int = 0, **variables: str) -> Any:
    """What `tests.drivers.questions` prints for a question, asked with that library and way of failing."""
    environment = os.environ | {"FAKE_NVML": mode, "FAKE_NVML_AFTER": str(after)} | variables
    environment.pop("LD_LIBRARY_PATH", None)
    if "CUDA_VISIBLE_DEVICES" not in variables:
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    command = [sys.executable, "-m", "tests.drivers.questions", question]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)
