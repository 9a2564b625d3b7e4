"""The line of port/serial_runner.py over machine.UART, which is handed in with a short `timeout` of its own."""

import time

from esp32_agent.port.serial_runner import Line


class UartLine(Line):
    """Collects what comes until a line is complete."""

    def __init__(self, uart: object) -> None:
        self._uart = uart
        self._received = b""

    def write(self, data: bytes) -> None:
        self._uart.write(data)

    def read_line(self, timeout_ms: int) -> bytes | None:
        deadline = time.ticks_add(time.ticks_ms(), timeout_ms)
        while b"\n" not in self._received:
            if time.ticks_diff(deadline, time.ticks_ms()) <= 0:
                return None
            self._received += self._uart.read(256) or b""
        line, _, self._received = self._received.partition(b"\n")
        return line.strip()
