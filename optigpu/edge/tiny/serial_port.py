"""A serial port or a pseudo-terminal by termios alone: bytes in and out, each within a time limit."""

import os
import select
import termios
import time
import tty
from types import TracebackType
from typing import Self

from optigpu.edge.tiny.errors import PortError, SilenceError
from optigpu.vocabulary import SpecError

DEFAULT_BAUD = 115_200
A_READ = 65_536


class SerialPort:
    """An open port: 8 data bits, no parity, one stop bit, no flow control, exclusively ours.

    Raises SpecError for a baud rate that the system lacks, PortError for a port that cannot be opened.
    """

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
        """Closes the port."""
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
    """The baud rates that termios knows here."""
    names = (name[1:] for name in dir(termios) if name.startswith("B") and name[1:].isdecimal())
    return sorted(int(name) for name in names if name != "0")
