"""The line of port/serial_runner.py over a terminal device such as /dev/ttyACM0."""

import os
import select
import termios
import time
import tty

from esp32_agent.port.base import RunnerError
from esp32_agent.port.serial_runner import Line


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
