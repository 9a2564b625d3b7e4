"""Runs a program of `child/` in a Python that has TensorFlow and may not have OptiGPU, and always ends it. The files of
a converted model are written into a temporary folder, and moved to their places when all are there."""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TypedDict

from optigpu.vocabulary import CancelledError, Document, OptiGPUError, SpecError, UnsupportedError

CHILD = Path(__file__).resolve().parent / "child"
TICK_S = 0.25
GRACE_S = 2.0
LONGEST_TAIL = 4096
LONGEST_ANSWERS = 16 * 2**20

# Loads the folder as a package of its own, so that nothing else of ours is on the other Python's path.
_START = (
    "import importlib.util as u, sys; f, step = sys.argv[2:4]; "
    "s = u.spec_from_file_location('optigpu_convert', f + '/__init__.py', submodule_search_locations=[f]); "
    "m = u.module_from_spec(s); sys.modules[s.name] = m; s.loader.exec_module(m); "
    "from optigpu_convert.answers import main; main(step)"
)
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",  # the same numbers with and without a GPU
    "KERAS_BACKEND": "tensorflow",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # the same numbers on every CPU
}
_NOT_INHERITED = ("OPTIGPU_", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")

Doing = Callable[[str], None]
Stop = Callable[[], str | None]
"""Returns the reason to stop, if there is one."""


@dataclass(frozen=True)
class Watch:
    """How a program is watched: who is told what it does, when its time is up (monotonic), who may stop it."""

    doing: Doing
    until: float
    stop: Stop


def run_program(python: Path, step: str, request: Mapping[str, object], watch: Watch) -> Document:
    """The program's answer. Raises SpecError or UnsupportedError for what the program refuses, ConversionError if it
    dies, answers nonsense or takes too long, and CancelledError when it is stopped; then it has been killed with all
    that it started."""
    reading, writing = os.pipe()
    try:
        process = _start(python, step, writing)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as answers, _ended(process):
        assert process.stdin is not None
        # Stdin stays open: its end tells the program that this process is gone.
        with suppress(BrokenPipeError):  # it died: listening finds out how
            process.stdin.write(json.dumps(request).encode() + b"\n")
        return _listen(process, answers, watch)


def _start(python: Path, step: str, descriptor: int) -> "subprocess.Popen[bytes]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    try:
        return subprocess.Popen(
            [python, "-c", _START, str(descriptor), str(CHILD), step],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=inherited | VARIABLES,
            pass_fds=(descriptor,),
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise SpecError(f"--python {python} cannot be started: {error.strerror}.") from None


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kills the process and its group at the end, if it has not ended by itself."""
    try:
        yield
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        if process.returncode is None:  # else its id may be another process's by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _listen(process: "subprocess.Popen[bytes]", answers: IO[bytes], watch: Watch) -> Document:
    assert process.stdout is not None
    received, printed, last = bytearray(), bytearray(), "starting"
    with selectors.DefaultSelector() as selector:
        for pipe, into in ((answers, received), (process.stdout, printed)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, into)
        while True:
            ended = process.poll() is not None
            ready = selector.select(TICK_S)
            for key, _ in ready:
                if not _read(key.fd, key.data):
                    selector.unregister(key.fileobj)
            del printed[:-LONGEST_TAIL]
            while (end := received.find(b"\n")) >= 0:
                line = bytes(received[:end])
                del received[: end + 1]
                message = message_of(line)
                if "done" in message:
                    return message["done"]
                last = message["doing"]
                watch.doing(last)
            if len(received) > LONGEST_ANSWERS:
                raise ConversionError("The conversion sent an answer that is too long.")
            if ended and not ready:
                raise ConversionError(_death(process.returncode, last, bytes(printed)))
            if time.monotonic() > watch.until:
                raise ConversionError(
                    "The conversion took longer than --timeout; it was ended, and nothing was written."
                )
            if (reason := watch.stop()) is not None:
                raise CancelledError(reason)


def _read(descriptor: int, into: bytearray) -> bool:
    """Whether the other end is still open."""
    with suppress(BlockingIOError):
        chunk = os.read(descriptor, 2**16)
        into += chunk
        return bool(chunk)
    return True


class _Message(TypedDict, total=False):
    doing: str
    done: Document


def message_of(line: bytes) -> _Message:
    try:
        message = json.loads(line)
        if "refused" in message:
            raise (SpecError if message["wrong"] else UnsupportedError)(str(message["refused"]))
        return _Message(done=message["done"]) if "done" in message else _Message(doing=str(message["doing"]))
    except (ValueError, KeyError, TypeError):
        raise ConversionError(f"The conversion sent an invalid answer: {line[:100]!r}.") from None


def _death(status: int, last: str, printed: bytes) -> str:
    """How the process ended, what it did then, and the last line that it printed."""
    if status < 0:
        how = f"was killed by signal {-status} ({signal.strsignal(-status)})"
    else:
        how = f"ended with status {status}"
    memory = " Memory may have been short." if status == -signal.SIGKILL else ""
    lines = [line.strip() for line in printed.decode(errors="replace").splitlines() if line.strip()]
    output = f" Its last output: {''.join(filter(str.isprintable, lines[-1]))[:300]}" if lines else ""
    return f"The conversion's process {how} while {last}, and nothing was written.{memory}{output}"


MANIFEST = "manifest.json"
GOLDEN = "golden.bin"
BYTES_A_LINE = 16


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """A temporary folder beside the output, on the same file system; it is removed at the end. Raises SpecError if
    nothing can be written there."""
    try:
        if output.exists() and not output.is_dir():
            raise SpecError(f"--output {output}: there is a file of that name; name a folder.")
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = output if output.is_dir() else output.parent
        folder = Path(tempfile.mkdtemp(prefix=".optigpu-convert-", dir=beside))
    except OSError as error:
        raise SpecError(f"--output {output} cannot be written: {error.strerror}.") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, names: tuple[str, ...], output: Path) -> None:
    """Moves the files into the output folder, the manifest last: where it is, all the others are. Raises SpecError if
    they cannot be moved."""
    try:
        output.mkdir(exist_ok=True)
        (output / MANIFEST).unlink(missing_ok=True)
        for name in sorted(names, key=lambda each: each == MANIFEST):
            os.replace(folder / name, output / name)
    except OSError as error:
        raise SpecError(f"--output {output} cannot be written: {error.strerror}.") from None


def c_array(name: str, model: bytes) -> tuple[str, str]:
    """The model as C++ source and its header, aligned as TFLite Micro wants it."""
    header = (
        f"#ifndef {name.upper()}_H_\n#define {name.upper()}_H_\n\n"
        f"extern const unsigned char {name}[];\nextern const unsigned int {name}_len;\n\n#endif\n"
    )
    lines = (
        "    " + ", ".join(f"0x{byte:02x}" for byte in model[start : start + BYTES_A_LINE]) + ","
        for start in range(0, len(model), BYTES_A_LINE)
    )
    source = (
        f'#include "{name}.h"\n\nalignas(16) const unsigned char {name}[] = {{\n'
        + "\n".join(lines)
        + f"\n}};\nconst unsigned int {name}_len = {len(model)};\n"
    )
    return source, header


NEEDED = ("tensorflow", "ai_edge_litert", "tflite_micro")
INSTALL = 'pip install -e ".[hardware]"'


def choose_python(named: Path | None) -> Path:
    """The named one, else this one. Raises UnsupportedError if this one lacks a package; it loads none of them."""
    if named is not None:
        return named
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise UnsupportedError(
            f"Converting needs TensorFlow, LiteRT and TFLite Micro, and this Python lacks {', '.join(lacking)}: "
            f"{INSTALL}, or name another Python with --python."
        )
    return Path(sys.executable)


class ConversionError(OptiGPUError):
    """The conversion failed: a process of it ended, took too long, or gave what cannot be right."""
