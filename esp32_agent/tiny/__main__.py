"""`python -m esp32_agent.tiny --model model.tflite`: a device of MLPerf Tiny on this host, with TFLite Micro behind it.

It serves a pseudo-terminal whose name it prints, or a serial port. Its figures are the host's and never a device's.
"""

import argparse
import os
import select
import sys
import termios
import tty
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from esp32_agent.port.base import RunnerError
from esp32_agent.port.host.board import HostBoard
from esp32_agent.port.host.clock import HostClock
from esp32_agent.port.host.runners import TflmRunner
from esp32_agent.tiny.codec import INPUTS, Codec, Scale
from esp32_agent.tiny.device import Stream, TinyDevice

LEAST_ARENA = 512
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


class ScaledRunner(TflmRunner):
    """TFLite Micro, which also says what the bytes of its tensors stand for."""

    def scales(self) -> tuple[Scale, Scale]:
        """Of the input and of the output."""
        given, answered = self._interpreter.get_input_details(0), self._interpreter.get_output_details(0)
        return _scale(given["quantization_parameters"]), _scale(answered["quantization_parameters"])


def _scale(parameters: dict[str, Any]) -> Scale:
    return Scale(float(parameters["scales"][0]), int(parameters["zero_points"][0]))


def main() -> int:
    """Serves until it is interrupted. 2 for a model or a port that cannot be used."""
    options = _options()
    try:
        runner = ScaledRunner(Path(options.model), options.arena_bytes)
        codec = Codec(options.profile, runner.input_bytes, *runner.scales())
        line = serial_line(options.port, options.baud) if options.port else pseudo_terminal()
    except (OSError, ValueError, RunnerError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    board = HostBoard("host", "0" * 64)
    return _serve(TinyDevice(_port(runner, board), line, codec, options.vendor), line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m esp32_agent.tiny", description=__doc__)
    parser.add_argument("--model", required=True, help="an int8 .tflite file")
    parser.add_argument("--profile", default="ic01", choices=sorted(INPUTS), help="the profile (ic01)")
    parser.add_argument("--vendor", default="optigpu", help="the name that it answers (optigpu)")
    parser.add_argument(
        "--arena-bytes", type=_arena, default=0, help="TFLite Micro's tensor arena (as large as it takes)"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--pty", action="store_true", help="a new pseudo-terminal (the default)")
    place.add_argument("--port", help="a serial port, /dev/ttyUSB0 for example")
    parser.add_argument("--baud", type=int, default=115200, help="of the serial port (115200)")
    return parser.parse_args()


def _arena(text: str) -> int:
    """With less than LEAST_ARENA TFLite Micro crashes instead of refusing."""
    count = int(text)
    if 0 < count < LEAST_ARENA:
        raise argparse.ArgumentTypeError(f"an arena has {LEAST_ARENA} bytes or more")
    return count


def _port(runner: ScaledRunner, board: HostBoard) -> Any:
    """The parts of a port that the protocol needs."""
    return SimpleNamespace(clock=HostClock(), runner=runner, board=board)


def _serve(device: TinyDevice, line: Line) -> int:
    """Serves until it is interrupted or the line has gone."""
    if line.name:
        print(line.name, flush=True)
    try:
        device.serve()
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        print(f"Error: the line has gone: {error}", file=sys.stderr)
        return 1
    finally:
        line.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
