"""Networks that TensorFlow makes once, and conversions that several tests look at."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
from PIL import Image

from optigpu.cli import main
from optigpu.documents.manifest import ModelManifest, read_manifest
from optigpu.edge.convert.process import CHILD, VARIABLES, Watch, message_of
from optigpu.vocabulary import Document
from tests.edge.tools import edge_python
from tests.pages import ROOT

PROGRAM = Path(__file__).with_name("resident_program.py")


class Resident:
    """The process, which keeps TensorFlow from one conversion to the next."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [python, PROGRAM, CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | VARIABLES,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, python: Path, step: str, request: Mapping[str, object], watch: Watch) -> Document:
        """As `run_program`, for a program that neither dies nor hangs."""
        del python
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([step, request]).encode() + b"\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            message = message_of(line)
            if "done" in message:
                return message["done"]
            watch.doing(message["doing"])
        raise AssertionError("the process has died")

    def command(self, *arguments: object) -> tuple[int, str, str]:
        """The status of `optigpu` with these arguments, and what it printed."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
            patched.setattr("optigpu.edge.convert.run_program", self.run)
            with pytest.raises(SystemExit) as ended:
                main([*map(str, arguments)])
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()


MAKE_MODELS = Path(__file__).with_name("make_models.py")
SIDE = 16
"""Of the input of the tiny network."""


class Ran(NamedTuple):
    """How a command ended, and the folder that it was told to write."""

    status: int
    out: str
    err: str
    output: Path


Convert = Callable[..., Ran]
RANDOM = ("--allow-random-calibration", "--samples", "8")


def leaves_nothing(ran: Ran) -> bool:
    return not ran.output.exists() and list(ran.output.parent.iterdir()) == []


def said(ran: Ran) -> str:
    """The one line that begins with Error."""
    (line,) = [line for line in ran.err.splitlines() if line.startswith("Error: ")]
    return line.removeprefix("Error: ")


@pytest.fixture(scope="session")
def edge() -> Path:
    """The Python with TensorFlow, LiteRT and TFLite Micro."""
    return edge_python()


def run_edge(python: Path, *arguments: object) -> str:
    """What a program prints in that Python."""
    ran = subprocess.run(
        [python, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="session")
def models(edge: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of make_models.py."""
    folder = tmp_path_factory.mktemp("models")
    run_edge(edge, MAKE_MODELS, folder)
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pictures in two subfolders, of several sizes and forms."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(5)
    for number in range(40):
        (folder / f"class{number % 2}").mkdir(exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (3, 3, 3), dtype=np.uint8))
        size = (SIDE + number, 2 * SIDE)
        name = f"{number}.{'png' if number % 3 else 'jpg'}"
        coarse.resize(size).save(folder / f"class{number % 2}" / name)
    return folder


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty inputs of the tiny network as an .npz file, each with a brightness of its own."""
    random = np.random.default_rng(6)
    path = tmp_path_factory.mktemp("samples") / "inputs.npz"
    levels = random.uniform(-1, 1, (60, 1, 1, 3))
    np.savez(
        path, inputs=np.clip(levels + random.normal(0, 0.3, (60, SIDE, SIDE, 3)), -1, 1).astype(np.float32)
    )
    return path


@pytest.fixture(scope="session")
def convert(edge: Path, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Runs `optigpu convert` with these arguments, in a process, into a folder that does not exist yet."""

    def run(*arguments: object, python: Path = edge) -> Ran:
        output = tmp_path_factory.mktemp("converted") / "out"
        command = command_line(*arguments, "--output", output, "--python", python)
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        return Ran(ran.returncode, ran.stdout, ran.stderr, output)

    return run


@pytest.fixture(scope="session")
def resident(edge: Path) -> Iterator[Resident]:
    with Resident(edge) as process:
        yield process


@pytest.fixture(scope="session")
def soon(resident: Resident, edge: Path, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """As `convert`, in this process, by the one that has TensorFlow loaded."""

    def run(*arguments: object) -> Ran:
        output = tmp_path_factory.mktemp("converted") / "out"
        return Ran(*resident.command("convert", *arguments, "--output", output, "--python", edge), output)

    return run


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "optigpu", "convert", *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def tiny(soon: Convert, models: Path, samples: Path) -> Ran:
    """The tiny network, calibrated with the .npz file."""
    ran = soon(models / "tiny.keras", "--npz", samples, "--name", "tiny", "--format", "json")
    assert ran.status == 0, ran.err
    return ran


@pytest.fixture(scope="session")
def tiny_manifest(tiny: Ran) -> ModelManifest:
    return read_manifest(tiny.output)


@pytest.fixture(scope="session")
def mobilenet(soon: Convert, images: Path) -> Ran:
    """MobileNetV2 of width 0.35 at 96x96, with images."""
    ran = soon(
        "--model", "mobilenet_v2", "--alpha", "0.35", "--input", "96", "--classes", "10", "--images", images
    )
    assert ran.status == 0, ran.err
    return ran


def document_of(ran: Ran) -> dict[str, Any]:
    """What the command printed as JSON."""
    document: dict[str, Any] = json.loads(ran.out)
    return document
