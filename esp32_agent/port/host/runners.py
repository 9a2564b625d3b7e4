"""Runners on a host: TFLite Micro, LiteRT with its reference kernels, which agree bit for bit, and the line of
port/serial_runner.py over a terminal device such as /dev/ttyACM0.

Reports of the first two rank nowhere: they show that a model and its golden outputs are right before a board is
flashed.
"""

import os
import select
import termios
import time
import tty
from importlib import metadata
from pathlib import Path
from typing import Any

from esp32_agent.port import files
from esp32_agent.port.base import Runner, RunnerError
from esp32_agent.port.serial_runner import Line

ARENA_PER_MODEL_BYTE = 10  # the interpreter's own rule of thumb


class _HostRunner(Runner):
    """What both have in common; the interpreters' own classes carry no types."""

    _interpreter: Any
    _numpy: Any
    _shape: tuple[int, ...]

    def _describe(self, given: dict[str, Any], answered: dict[str, Any]) -> None:
        """Raises RunnerError unless both tensors are int8."""
        for kind, details in (("input", given), ("output", answered)):
            if self._numpy.dtype(details["dtype"]) != self._numpy.int8:
                raise RunnerError(f"The model's {kind} is not int8.")
        self._shape = tuple(int(size) for size in given["shape"])
        self.input_bytes = int(self._numpy.prod(given["shape"]))
        self.output_bytes = int(self._numpy.prod(answered["shape"]))

    def _tensor(self, data: bytes) -> Any:
        if len(data) != self.input_bytes:
            raise RunnerError(f"The input has {len(data)} bytes and not {self.input_bytes}.")
        return self._numpy.frombuffer(data, dtype=self._numpy.int8).reshape(self._shape)


class TflmRunner(_HostRunner):
    """TFLite Micro's interpreter (package tflite-micro). An arena of 0 bytes: one that is large enough."""

    name = "tflm-host"

    def __init__(self, path: Path, arena_bytes: int = 0) -> None:
        runtime, self._numpy = _load("tflite_micro.python.tflite_micro.runtime", "tflite-micro")
        self.version = metadata.version("tflite-micro")
        self.model_sha256 = files.model_sha256(str(path))
        content = path.read_bytes()
        self.arena_bytes = arena_bytes or ARENA_PER_MODEL_BYTE * len(content)
        try:
            self._interpreter = runtime.Interpreter.from_bytes(content, arena_size=self.arena_bytes)
            self._describe(self._interpreter.get_input_details(0), self._interpreter.get_output_details(0))
        except RunnerError:
            raise
        except Exception as error:  # a damaged model makes the parser raise whatever it trips over
            raise RunnerError(
                f"TFLite Micro cannot load {path} with an arena of {self.arena_bytes} bytes: {error}"
            ) from None

    def set_input(self, data: bytes) -> None:
        self._interpreter.set_input(self._tensor(data), 0)

    def invoke(self) -> None:
        try:
            self._interpreter.invoke()
        except RuntimeError as error:
            raise RunnerError(f"The inference failed: {error}") from None

    def output(self) -> bytes:
        return bytes(self._interpreter.get_output(0).tobytes())


class LiteRtRunner(_HostRunner):
    """LiteRT (package ai-edge-litert). Its default kernels differ from TFLite Micro's: the reference kernels do not."""

    name = "litert-host"
    arena_bytes = 0

    def __init__(self, path: Path) -> None:
        module, self._numpy = _load("ai_edge_litert.interpreter", "ai-edge-litert")
        self.version = metadata.version("ai-edge-litert")
        self.model_sha256 = files.model_sha256(str(path))
        try:
            self._interpreter = module.Interpreter(
                model_path=str(path), experimental_op_resolver_type=module.OpResolverType.BUILTIN_REF
            )
            self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            raise RunnerError(f"LiteRT cannot load {path}: {error}") from None
        given, answered = self._interpreter.get_input_details()[0], self._interpreter.get_output_details()[0]
        self._given, self._answered = given["index"], answered["index"]
        self._describe(given, answered)

    def set_input(self, data: bytes) -> None:
        self._interpreter.set_tensor(self._given, self._tensor(data))

    def invoke(self) -> None:
        try:
            self._interpreter.invoke()
        except RuntimeError as error:
            raise RunnerError(f"The inference failed: {error}") from None

    def output(self) -> bytes:
        return bytes(self._interpreter.get_tensor(self._answered).tobytes())


def _load(module: str, package: str) -> tuple[Any, Any]:
    """A module of an optional package, and numpy. Raises RunnerError if they are missing."""
    import importlib

    try:
        return importlib.import_module(module), importlib.import_module("numpy")
    except ImportError:
        raise RunnerError(f"This runner needs {package}: pip install --pre {package} numpy") from None


class TtyLine(Line):
    """Opens the device raw, at `baud` bits a second. Raises RunnerError."""

    def __init__(self, path: str, baud: int) -> None:
        speed = getattr(termios, f"B{baud}", None)
        if speed is None:
            raise RunnerError(f"This system has no serial speed of {baud} baud.")
        self._path = path
        self._received = b""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_NOCTTY)
        except OSError as error:
            raise RunnerError(f"The serial line {path} cannot be opened: {error.strerror}.") from None
        try:
            tty.setraw(self._file)
            attributes = termios.tcgetattr(self._file)
            attributes[4] = attributes[5] = speed
            termios.tcsetattr(self._file, termios.TCSANOW, attributes)
        except termios.error as error:
            os.close(self._file)
            raise RunnerError(f"The device {path} is not a serial line: {error.args[1]}.") from None

    def write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise RunnerError(f"The serial line {self._path} failed: {error.strerror}.") from None

    def read_line(self, timeout_ms: int) -> bytes | None:
        deadline = time.monotonic() + timeout_ms / 1000
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._file], [], [], left)[0]:
                return None
            try:
                piece = os.read(self._file, 4096)
            except OSError as error:
                raise RunnerError(f"The serial line {self._path} failed: {error.strerror}.") from None
            if not piece:
                raise RunnerError(f"The serial line {self._path} was closed.")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.strip()

    def close(self) -> None:
        os.close(self._file)
