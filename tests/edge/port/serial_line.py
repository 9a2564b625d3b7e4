"""The serial firmware's session, compiled for this host, at the other end of a pseudo-terminal."""

import os
import subprocess
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from esp32_agent.port.host.tty import TtyLine

ROOT = Path(__file__).resolve().parents[3]
HEADERS = ROOT / "esp32_agent" / "firmware" / "serial" / "main"
SOURCE = Path(__file__).with_name("firmware.cpp")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-Wno-vla")


def build(folder: Path) -> Path:
    """The program, with the warnings of a careful compiler as errors and undefined behaviour as an abort."""
    program = folder / "firmware"
    sanitizers = ("-fsanitize=undefined,address", "-fno-sanitize-recover=all")
    options = ("-std=c++17", "-O1", "-g", *WARNINGS, *sanitizers, f"-I{HEADERS}")
    subprocess.run(["g++", *options, str(SOURCE), "-o", str(program)], check=True)
    return program


@contextmanager
def board(
    program: Path, input_bytes: int, output_bytes: int, latencies: str = "1000", fault: str = ""
) -> Iterator[TtyLine]:
    """A board on a line that a host opened."""
    own, device = os.openpty()
    tty.setraw(device)  # until the host opens the device, the terminal would echo what the board says
    arguments = [str(program), str(input_bytes), str(output_bytes), latencies, *([fault] if fault else [])]
    process = subprocess.Popen(arguments, stdin=own, stdout=own)
    line = TtyLine(os.ttyname(device), 921_600)
    try:
        yield line
    finally:
        line.close()
        process.kill()
        process.wait()
        os.close(own)
        os.close(device)


def exchange(program: Path, lines: bytes, *arguments: str) -> list[bytes]:
    """All that the board says to these lines, its first words left out."""
    done = subprocess.run([str(program), *arguments], input=lines, capture_output=True, check=True)
    return done.stdout.splitlines()[1:]
