"""`python -m tests.edge.tiny_device`: the real device side over a pseudo-terminal, with a small model of pure Python.

The model's output for class c is the input's byte c. `--fault` garbles the line, as bad cables and boards do.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from esp32_agent.port.host.clock import HostClock
from esp32_agent.tiny.codec import Codec, Scale
from esp32_agent.tiny.device import Stream, TinyDevice
from esp32_agent.tiny.lines import Line, pseudo_terminal
from tests.pages import ROOT


@contextmanager
def small_device(*arguments: str) -> Iterator[str]:
    """tests.edge.tiny_device with these arguments; yields its pseudo-terminal's name."""
    with child([sys.executable, "-m", "tests.edge.tiny_device", *arguments]) as name:
        yield name


@contextmanager
def micro_device(python: Path, model: Path, *arguments: str) -> Iterator[str]:
    """The host agent with the real TFLite Micro behind it."""
    with child([str(python), "-m", "esp32_agent.tiny", "--model", str(model), "--pty", *arguments]) as name:
        yield name


@contextmanager
def child(command: list[str]) -> Iterator[str]:
    """Starts it, yields the line that it prints first, and ends it; it must have lived so long."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        name = process.stdout.readline().strip()
        assert name, process.communicate()[1]
        yield name
        assert process.poll() is None, process.communicate()[1]
    finally:
        process.kill()
        process.communicate()


INPUT_BYTES, CLASSES = 48, 4


class SmallRunner:
    """A model that takes `seconds` for an inference."""

    input_bytes, output_bytes = INPUT_BYTES, CLASSES

    def __init__(self, seconds: float, fails_after: int | None) -> None:
        self._seconds, self._left = seconds, fails_after
        self._input = bytes(INPUT_BYTES)

    def set_input(self, data: bytes) -> None:
        self._input = data

    def invoke(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("invoke failed\n[status 1]")
        time.sleep(self._seconds)

    def output(self) -> bytes:
        return self._input[:CLASSES]


class SmallBoard:
    def collect(self) -> None:
        """Has no garbage."""


class FastClock(HostClock):
    """A clock that says that only half of the time has passed."""

    def ticks_us(self) -> int:
        return super().ticks_us() // 2


class BadLine:
    """The line with a fault: `change` gets each write of the device and says what is written instead."""

    def __init__(self, line: Line, change: Callable[[bytes], bytes]) -> None:
        self._line, self._change = line, change

    def read(self, count: int) -> bytes | None:
        return self._line.read(count)

    def write(self, data: bytes) -> int:
        changed = self._change(data)
        while changed:
            changed = changed[self._line.write(changed) :]
        return len(data)


REPLACED: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "noise": (b"", lambda data: b"\xff\x00\x9e[noise]\r\n" + data),
    "glued_noise": (b"m-ready", lambda data: b"\xfe\xfd" + data),
    "reset": (b"m-infer-start", lambda _: b"m-init-done\r\nm-ready\r\n"),
    "wrong_count": (b"m-infer-start", lambda _: b"m-infer-start-3\r\n"),
    "no_load_done": (b"m-load-done", lambda _: b""),
    "no_numbers": (b"m-results", lambda _: b"m-results-[nan,,x]\r\n"),
    "endless": (b"m-results", lambda _: b"x" * 70_000),
}
"""How an answer begins that a fault of this name changes, and what is written instead."""


class Faults:
    """What else may become of an answer; those that are named `once` happen once."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._happened = False
        self._inferring = False

    def named(self, name: str) -> Callable[[bytes], bytes]:
        if name not in REPLACED:
            changed: Callable[[bytes], bytes] = getattr(self, name)
            return changed
        begins, instead = REPLACED[name]
        return lambda data: instead(data) if data.startswith(begins) else data

    def inferring(self, data: bytes) -> bool:
        """Whether an inference has begun by now."""
        self._inferring = self._inferring or data.startswith(b"m-infer-start")
        return self._inferring

    def once(self) -> bool:
        first, self._happened = not self._happened, True
        return first

    def silence_in_infer(self, data: bytes) -> bytes:
        return b"" if self.inferring(data) and not data.startswith((b"m-infer-start", b"m-lap")) else data

    def half_line(self, data: bytes) -> bytes:
        if self.inferring(data) and data.startswith((b"m-results", b"m-ready")):
            return data[:6] if data.startswith(b"m-results") else b""
        return data

    def reset_once(self, data: bytes) -> bytes:
        if data.startswith(b"m-infer-start") and self.once():
            return b"m-timestamp-mode-performance\r\nm-lap-us-5\r\nm-init-done\r\nm-ready\r\n"
        return data

    def one_lap(self, data: bytes) -> bytes:
        return b"" if self.inferring(data) and data.startswith(b"m-lap-us") and self.once() else data

    def garbled_load_once(self, data: bytes) -> bytes:
        if data.startswith(b"m-ready") and self.once():
            return b"e-[Invalid hex digit 'z1']\r\n" + data
        return data

    def stutter(self, data: bytes) -> bytes:
        """Noise without an end: lines that are none of the protocol's, again and again."""
        while data.startswith(b"m-results"):
            time.sleep(0.02)
            self._line.write(b"?\r\n")
        return data


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="ic01")
    parser.add_argument("--seconds", type=float, default=0.0, help="of one inference")
    parser.add_argument("--fails-after", type=int)
    parser.add_argument("--fast-clock", action="store_true")
    parser.add_argument("--energy", action="store_true")
    parser.add_argument("--fault")
    options = parser.parse_args()
    line = pseudo_terminal()
    print(line.name, flush=True)
    stream = BadLine(line, Faults(line).named(options.fault)) if options.fault else line
    clock = FastClock() if options.fast_clock else HostClock()
    port: Any = SimpleNamespace(
        clock=clock, board=SmallBoard(), runner=SmallRunner(options.seconds, options.fails_after)
    )
    codec = Codec(options.profile, INPUT_BYTES, Scale(0.5, 0), Scale(1.0, -128))
    pulse = (lambda: None) if options.energy else None
    TinyDevice(port, cast(Stream, stream), codec, "small", pulse).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
