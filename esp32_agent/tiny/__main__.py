"""`python -m esp32_agent.tiny --model model.tflite`: a device of MLPerf Tiny on this host, with TFLite Micro behind it.

It serves a pseudo-terminal whose name it prints, or a serial port. Its figures are the host's and never a device's.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from esp32_agent.port.base import RunnerError
from esp32_agent.port.host.board import HostBoard
from esp32_agent.port.host.clock import HostClock
from esp32_agent.port.host.runners import TflmRunner
from esp32_agent.tiny.codec import INPUTS, Codec, Scale
from esp32_agent.tiny.device import TinyDevice
from esp32_agent.tiny.lines import Line, pseudo_terminal, serial_line

LEAST_ARENA = 512


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
