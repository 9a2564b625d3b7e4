"""Streams for the device's side on a host: a pseudo-terminal of its own, or a serial line."""

import os
import select
import termios
import tty

from esp32_agent.tiny.device import Stream

DROP_S = 1.0
"""What nobody reads for so long is dropped, as a UART would."""


class Line(Stream):
    """One open terminal. `name` is what the other side opens; None for a line that has another end."""

    def __init__(self, descriptor: int, name: str | None = None, held: int | None = None) -> None:
        self._descriptor, self._held, self.name = descriptor, held, name

    def read(self, count: int) -> bytes | None:
        """At least one byte; None where none came within half a second."""
        ready, _, _ = select.select([self._descriptor], [], [], 0.5)
        return os.read(self._descriptor, count) if ready else None

    def write(self, data: bytes) -> int:
        """How many bytes were taken, or dropped."""
        _, ready, _ = select.select([], [self._descriptor], [], DROP_S)
        return os.write(self._descriptor, data) if ready else len(data)

    def close(self) -> None:
        """Closes both ends."""
        os.close(self._descriptor)
        if self._held is not None:
            os.close(self._held)


def pseudo_terminal() -> Line:
    """A new pseudo-terminal. Its other end stays open here too, so that a runner may come and go."""
    master, other = os.openpty()
    tty.setraw(other)
    os.set_blocking(master, False)
    return Line(master, os.ttyname(other), other)


def serial_line(path: str, baud: int = 115200) -> Line:
    """A serial port with 8 data bits, no parity, one stop bit. Raises ValueError for a rate that the system lacks."""
    speed = getattr(termios, f"B{baud}", None)
    if speed is None:
        raise ValueError(f"this system has no baud rate of {baud}")
    descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    tty.setraw(descriptor)
    modes = termios.tcgetattr(descriptor)
    modes[2] |= termios.CLOCAL | termios.CREAD
    modes[4] = modes[5] = speed
    termios.tcsetattr(descriptor, termios.TCSANOW, modes)
    return Line(descriptor)
