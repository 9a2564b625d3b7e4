"""A model that runs in the firmware of firmware/serial, on a board at the other end of a serial line.

Both sides send one JSON object a line (firmware/serial/README.md). The line is handed in.
"""

import binascii
import json

from esp32_agent.port.base import Runner, RunnerError

PIECE_BYTES = 256
ANSWER_MS = 5_000
INFERENCE_MS = 120_000
READY_MS = 10_000


class Line:
    """A serial line."""

    def write(self, data: bytes) -> None:
        """All of it. Raises RunnerError."""
        raise NotImplementedError

    def read_line(self, timeout_ms: int) -> bytes | None:
        """A line without its end; None when the time is over. Raises RunnerError."""
        raise NotImplementedError


class SerialRunner(Runner):
    """The board's clock times the inference: the line's own time would be most of what a host sees.

    `info` is what the firmware says of itself: chip, clock_hz, firmware_sha256, reset_reason, heap_free, ...
    """

    name = "tflm-serial"

    def __init__(self, line: Line) -> None:
        self._line = line
        self._number = 0
        self._input = b""
        self._input_crc = 0
        self.info = self._first_answer()
        self.version = text(self.info, "version")
        self.model_sha256 = text(self.info, "model_sha256")
        self.arena_bytes = whole(self.info, "arena_bytes")
        self.input_bytes = whole(self.info, "input_bytes")
        self.output_bytes = whole(self.info, "output_bytes")

    def set_input(self, data: bytes) -> None:
        """The board keeps its input, so that the same one is not sent again."""
        if len(data) != self.input_bytes:
            raise RunnerError(f"The input has {len(data)} bytes and not {self.input_bytes}.")
        if data == self._input:
            return
        self._input = b""
        for offset in range(0, len(data), PIECE_BYTES):
            piece = binascii.hexlify(data[offset : offset + PIECE_BYTES]).decode()
            self._ask({"do": "input", "offset": offset, "data": piece}, ANSWER_MS)
        self._input = data
        self._input_crc = binascii.crc32(data)

    def invoke(self) -> int:
        """Returns the microseconds that the board measured. Raises RunnerError if the input was damaged on the line."""
        answer = self._ask({"do": "invoke"}, INFERENCE_MS)
        if whole(answer, "input_crc") != self._input_crc:
            self._input = b""
            raise RunnerError("The board has another input than was sent: the serial line loses bytes.")
        return whole(answer, "us")

    def output(self) -> bytes:
        parts: list[bytes] = []
        crc = 0
        for offset in range(0, self.output_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, self.output_bytes - offset)
            answer = self._ask({"do": "output", "offset": offset, "size": size}, ANSWER_MS)
            parts.append(binascii.unhexlify(text(answer, "data")))
            crc = whole(answer, "crc")
        data = b"".join(parts)
        if binascii.crc32(data) != crc:
            raise RunnerError("The output was damaged on the serial line.")
        return data

    def measure(self, count: int, warmup: int) -> dict[str, int | str | None]:
        """The board's own statistics over `count` inferences: count, total_us, min_us, p50_us, p90_us, p99_us."""
        return self._ask({"do": "measure", "count": count, "warmup": warmup}, INFERENCE_MS)

    def _first_answer(self) -> dict[str, int | str | None]:
        """A board that a new connection resets says nothing until it has booted, so that it is asked again."""
        attempts = READY_MS // 1000
        while True:
            attempts -= 1
            try:
                return self._ask({"do": "info"}, 1000)
            except RunnerError:
                if attempts <= 0:
                    raise

    def _ask(self, request: dict[str, int | str], timeout_ms: int) -> dict[str, int | str | None]:
        self._number += 1
        request["id"] = self._number
        self._line.write(json.dumps(request).encode() + b"\n")
        while True:
            line = self._line.read_line(timeout_ms)
            if line is None:
                raise RunnerError(
                    "The board on the serial line does not answer: is the serial firmware on it?"
                )
            answer = parse(line)
            if "ready" in answer and self._number > 1:
                raise RunnerError("The board on the serial line restarted.")
            if "error" in answer and answer.get("id") in (0, self._number):
                raise RunnerError(f"The board refused {request['do']}: {answer['error']}")
            if answer.get("id") == self._number:
                return answer


def parse(line: bytes) -> dict[str, int | str | None]:
    """The object of a line; none for what a boot loader or a log prints."""
    if not line.startswith(b"{"):
        return {}
    try:
        answer = json.loads(line.decode())
    except (ValueError, UnicodeError):
        return {}
    return answer if isinstance(answer, dict) else {}


def whole(answer: dict[str, int | str | None], name: str) -> int:
    """A whole number of an answer. Raises RunnerError if it has none."""
    value = answer.get(name)
    if not isinstance(value, int):
        raise RunnerError(f"The board's answer has no whole number `{name}`.")
    return value


def text(answer: dict[str, int | str | None], name: str) -> str:
    """A text of an answer. Raises RunnerError if it has none."""
    value = answer.get(name)
    if not isinstance(value, str):
        raise RunnerError(f"The board's answer has no text `{name}`.")
    return value
