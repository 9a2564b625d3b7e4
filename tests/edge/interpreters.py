"""Runs code in MicroPython: its native x64 port with a small heap, and its 32-bit WebAssembly build."""

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.edge import tools
from tools.agent_lint import FOLDER, board_files

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 120


def agent_files() -> list[Path]:
    """The agent's files that run on a board."""
    return [path.relative_to(ROOT) for path in board_files(ROOT / FOLDER)]


def core_files() -> list[Path]:
    """The core, and what it knows of the port."""
    inner = [path for path in agent_files() if path.parts[1] == "core"]
    return [
        *inner,
        Path("esp32_agent/__init__.py"),
        Path("esp32_agent/port/__init__.py"),
        Path("esp32_agent/port/base.py"),
    ]


def suite_files() -> list[Path]:
    """The files of core's suites, with the packages in which they lie."""
    core = ROOT / "tests" / "edge" / "core"
    files = [
        ROOT / "tests" / "__init__.py",
        core.parent / "__init__.py",
        *sorted((core / "suites").glob("*.py")),
    ]
    files += [core / "__init__.py", core / "run_suites.py", core / "measure_heap.py"]
    return [path.relative_to(ROOT) for path in files]


def compile_file(path: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Compiles a file of the repository to the same place under `folder`."""
    to = folder / path.with_suffix(".mpy")
    to.parent.mkdir(parents=True, exist_ok=True)
    command = [str(tools.mpy_cross()), *options, "-s", str(path), "-o", str(to), str(ROOT / path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def compile_all(files: Sequence[Path], folder: Path, *options: str) -> None:
    """Compiles files, several at a time. Raises RuntimeError with the compiler's message."""
    with ThreadPoolExecutor(4) as pool:
        for done in pool.map(lambda path: compile_file(path, folder, *options), files):
            if done.returncode != 0:
                raise RuntimeError(done.stderr)


def native(code: str, folder: Path, heap: str = "128K") -> str:
    """What `code` prints in the native port, where `folder` is the current directory and on sys.path."""
    command = [str(tools.micropython()), "-X", f"heapsize={heap}", "-c", code]
    return _output(
        subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, check=False)
    )


def wasm(calls: Sequence[str], folder: Path, files: Sequence[Path]) -> str:
    """What pieces of code print in the WebAssembly build, each run by a call of its own; `folder` holds the files."""
    runner = Path(__file__).with_name("run_wasm.mjs")
    command = [str(tools.node()), str(runner), str(tools.wasm()), str(folder), "\n#call\n".join(calls)]
    done = subprocess.run(
        [*command, *map(str, files)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return _output(done)


def _output(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr
