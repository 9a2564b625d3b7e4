"""A serial port or a pseudo-terminal by termios alone, commands and answers over it, and the device that speaks them:
who it is, its input, its inferences. What is sent ends with `%`, what comes are lines, the last `m-ready`."""

import os
import re
import select
import termios
import time
import tty
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from optigpu.vocabulary import OptiGPUError, SpecError


class TinyError(OptiGPUError):
    """The device cannot be driven; the text is one sentence for a person."""


class PortError(TinyError):
    """The serial port cannot be opened, or has gone."""


class SilenceError(TinyError):
    """The device says nothing for too long."""


class ResetError(TinyError):
    """The device started again in the middle of an answer."""


class AnswerError(TinyError):
    """The answer is not what the protocol asks for."""


DEFAULT_BAUD = 115_200
A_READ = 65_536


class SerialPort:
    """An open port: 8 data bits, no parity, one stop bit, no flow control, exclusively ours. Raises SpecError for a
    baud rate that the system lacks, PortError for a port that cannot be opened."""

    def __init__(self, path: str, baud: int = DEFAULT_BAUD) -> None:
        speed = getattr(termios, f"B{baud}", None)
        if speed is None:
            raise SpecError(f"This system has no baud rate of {baud}. Valid: {', '.join(map(str, rates()))}.")
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError as error:
            raise PortError(f"{path} cannot be opened: {error.strerror}.") from error
        try:
            self._configure(speed)
        except (termios.error, OSError) as error:
            self.close()
            raise PortError(f"{path} is not a serial port: {error.args[-1]}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, timeout_s: float) -> bytes:
        """What has come, at least one byte; nothing at the end of the time. Raises PortError when the port has gone."""
        ready, _, _ = select.select([self._descriptor], [], [], max(timeout_s, 0.0))
        if not ready:
            return b""
        try:
            data = os.read(self._descriptor, A_READ)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise self._gone(error.strerror) from error
        if not data:
            raise self._gone("end of file")
        return data

    def write(self, data: bytes, timeout_s: float) -> None:
        """Writes all of it. Raises SilenceError if the other side takes nothing for so long."""
        deadline = time.monotonic() + timeout_s
        while data:
            _, ready, _ = select.select([], [self._descriptor], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise SilenceError(f"The device on {self.path} takes no bytes for {timeout_s:g} s.")
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._gone(error.strerror) from error

    def forget(self) -> None:
        """Drops what has come and was not read."""
        termios.tcflush(self._descriptor, termios.TCIFLUSH)

    def _configure(self, speed: int) -> None:
        tty.setraw(self._descriptor)
        modes = termios.tcgetattr(self._descriptor)
        modes[2] |= termios.CLOCAL | termios.CREAD
        # Without HUPCL the control lines stay as they are when the port is closed: many boards would reset.
        modes[2] &= ~(termios.HUPCL | termios.CRTSCTS | termios.CSTOPB)
        modes[4] = modes[5] = speed
        termios.tcsetattr(self._descriptor, termios.TCSANOW, modes)

    def _gone(self, why: str | None) -> PortError:
        return PortError(f"The device on {self.path} has gone: {why}.")


def rates() -> list[int]:
    names = (name[1:] for name in dir(termios) if name.startswith("B") and name[1:].isdecimal())
    return sorted(int(name) for name in names if name != "0")


SILENCE_S = 5.0
SETTLE_S, SETTLE_MOST_S = 0.2, 3.0
LONGEST_COMMAND = 80
LONGEST_LINE = 65_536
MOST_LINES = 20_000
READY = "m-ready"
_BOOT = re.compile(r"^m-(init-done|timestamp-mode-\w+)$")
_OURS = re.compile(r"^[me]-[ -~]*$")


@dataclass(frozen=True)
class Line:
    """A line of an answer, and the host's clock when it was there."""

    text: str
    at_s: float


@dataclass(frozen=True)
class Answer:
    """The lines of an answer without its `m-ready`. `noise` counts lines that are none of the protocol's."""

    command: str
    lines: tuple[Line, ...]
    noise: int = 0

    @property
    def errors(self) -> list[str]:
        """What the device complains of: the texts of its `e-[...]` lines."""
        return [each.text[2:].strip("[]") for each in self.lines if each.text.startswith("e-")]

    def found(self, pattern: str) -> list[tuple[str, float]]:
        """The first group of each line that matches all of the pattern, and when it came."""
        matches = ((re.fullmatch(pattern, line.text), line.at_s) for line in self.lines)
        return [(match[1], at_s) for match, at_s in matches if match]

    def only(self, pattern: str, what: str) -> str:
        """The group of the one line that matches. Raises AnswerError where there is none, or several."""
        found = self.found(pattern)
        if len(found) == 1:
            return found[0][0]
        said = f": {self.errors[0]}" if self.errors else ""
        count = "no line" if not found else f"{len(found)} lines"
        raise AnswerError(f"The answer to `{self.command}` has {count} with {what}{said}.")


class Link:
    """Speaks with the device on an open port."""

    def __init__(self, port: SerialPort, clock: Callable[[], float] = time.monotonic) -> None:
        self._port, self._clock = port, clock
        self._held = bytearray()
        self.noise = 0
        """Lines so far that are none of the protocol's."""

    def settle(self) -> None:
        """Waits until the device is quiet, and drops what it said: a board may start when its port is opened."""
        deadline = self._clock() + SETTLE_MOST_S
        while self._clock() < deadline and self._port.read(SETTLE_S):
            continue
        self._port.forget()
        self._held.clear()

    def ask(self, command: str, silence_s: float = SILENCE_S) -> Answer:
        """Sends a command and returns its answer. Raises SilenceError if no line of the protocol comes for `silence_s`,
        ResetError for a device that starts again meanwhile, and AnswerError for an answer without an end."""
        if len(command) > LONGEST_COMMAND:
            raise AnswerError(
                f"A command has at most {LONGEST_COMMAND} characters; `{command[:20]}...` is longer."
            )
        self._port.write(f"{command}%".encode("ascii"), silence_s)
        lines: list[Line] = []
        before, heard_at = self.noise, self._clock()
        while True:
            text = self._line(command, silence_s, heard_at + silence_s)
            if text.endswith(READY):  # noise may stand before it
                self.noise += text != READY
                return Answer(command, tuple(lines), self.noise - before)
            if _BOOT.match(text):
                raise ResetError(
                    f"The device on {self._port.path} started again while it answered `{command}`."
                )
            if _OURS.match(text):
                heard_at = self._clock()
                lines.append(Line(text, heard_at))
            elif text:
                self.noise += 1
            if len(lines) + self.noise - before > MOST_LINES:
                raise AnswerError(f"The answer to `{command}` does not end: more than {MOST_LINES} lines.")

    def _line(self, command: str, silence_s: float, deadline: float) -> str:
        """The next line without its end; bytes that are no ASCII are replaced."""
        while (end := self._held.find(b"\n", 0, LONGEST_LINE + 1)) < 0:
            if len(self._held) > LONGEST_LINE:
                raise AnswerError(f"The answer to `{command}` has a line of more than {LONGEST_LINE} bytes.")
            left_s = deadline - self._clock()
            if left_s <= 0:
                half = f", in the middle of a line of {len(self._held)} bytes" if self._held else ""
                raise SilenceError(
                    f"The device on {self._port.path} is silent for {silence_s:g} s after `{command}`{half}: check the "
                    "port, the baud rate and that the firmware speaks MLPerf Tiny's protocol."
                )
            self._held += self._port.read(left_s)
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line.decode("ascii", "replace").strip("\r\0 ")


INFER_SILENCE_S = 30.0
A_LINE = 31
"""Bytes of input in one command, as the open runner sends them."""
TRIES = 3
LAP_WRAP_US = 2**32
"""Devices print their microseconds as 32 bits."""


@dataclass(frozen=True)
class Identity:
    """What a device says of itself."""

    name: str
    firmware: str
    model: str


@dataclass(frozen=True)
class Inference:
    """`count` inferences: the device's own time for all of them, the host's beside it, and the last result."""

    count: int
    elapsed_us: int
    host_s: float
    results: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return self.count / (self.elapsed_us / 1e6)


class Device:
    """Drives a device over a link. Methods raise TinyError."""

    def __init__(
        self, link: Link, silence_s: float = SILENCE_S, infer_silence_s: float = INFER_SILENCE_S
    ) -> None:
        self._link = link
        self._silence_s, self._infer_silence_s = silence_s, infer_silence_s

    def identify(self) -> Identity:
        """Waits for quiet and asks who is there; a few times, since half a command may be left in the device."""
        self._link.settle()
        for _ in range(TRIES):
            answer = self._link.ask("name", self._silence_s)
            if names := answer.found(r"m-name-dut-\[(.*)\]"):
                break
        else:
            raise AnswerError("The device does not say its name: its firmware speaks another protocol.")
        profile = self._link.ask("profile", self._silence_s)
        return Identity(
            name=names[0][0],
            firmware=profile.only(r"m-profile-\[(.*)\]", "its firmware"),
            model=profile.only(r"m-model-\[(.*)\]", "its model"),
        )

    def load(self, data: bytes) -> None:
        """Sends an input; again from its beginning if a line of it was garbled on the way."""
        why: str | None = None
        for _ in range(TRIES):
            why = self._load(data)
            if why is None:
                return
        raise AnswerError(f"An input of {len(data)} bytes cannot be loaded: {why}.")

    def _load(self, data: bytes) -> str | None:
        """Why it failed, if it did."""
        begun = self._link.ask(f"db load {len(data)}", self._silence_s)
        if begun.errors:
            return begun.errors[0]
        done = False
        for place in range(0, len(data), A_LINE):
            answer = self._link.ask(f"db {data[place : place + A_LINE].hex()}", self._silence_s)
            if answer.errors:
                return answer.errors[0]
            done = bool(answer.found("(m-load-done)"))
            if done and place + A_LINE < len(data):
                return f"the device says that it is complete after {place + A_LINE} bytes"
        return None if done else "the device does not say that it is complete"

    def buffer(self) -> bytes:
        answer = self._link.ask("db print", self._silence_s)
        rows = answer.found(r"m-buffer-([0-9a-fA-F]{2}(?:-[0-9a-fA-F]{2})*)")
        return bytes.fromhex("".join(row.replace("-", "") for row, _ in rows))

    def infer(self, count: int, warmup: int, expected_s: float = 0.0) -> Inference:
        """Runs the model `count` times after a warm-up; `expected_s` is how long it will take, as far as is known."""
        answer = self._link.ask(f"infer {count} {warmup}", self._infer_silence_s + 2 * expected_s)
        if answer.errors:
            raise AnswerError(f"The device cannot infer: {answer.errors[0]}.")
        begun = [text for text, _ in answer.found(r"m-infer-start-(\d+)")]
        if list(map(int, begun)) != [count]:
            said = " and ".join(begun) or "none"
            raise AnswerError(f"The device was asked for {count} inferences and began {said}.")
        answer.only("m-(infer-done)", "the end of the inferences")
        laps = answer.found(r"m-lap-us-(\d{1,20})")
        if not laps:
            raise AnswerError(
                "The device gives no times: it is in energy mode, or its firmware is built for it."
            )
        if len(laps) != 2:
            raise AnswerError(f"An inference has two times; the device gave {len(laps)}.")
        elapsed_us = (int(laps[1][0]) - int(laps[0][0])) % LAP_WRAP_US
        if elapsed_us == 0:
            raise AnswerError(f"The device took no time for {count} inferences: its clock stands still.")
        results = numbers(answer.only(r"m-results-\[(.*)\]", "results"))
        return Inference(count, elapsed_us, laps[1][1] - laps[0][1], results)


def numbers(text: str) -> tuple[float, ...]:
    """The numbers of a result. Raises AnswerError for what is none."""
    found = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", word) for word in found):
        raise AnswerError(f"The device's result is no list of numbers: {text[:60]}.")
    return tuple(map(float, found))
