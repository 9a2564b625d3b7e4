"""The decoder's ARM instruction sets, built by a cross-compiler and run by an emulator, which says nothing of speed."""

import subprocess
from pathlib import Path

import pytest

from optigpu.ops.decode.cpu.decoder import INSTRUCTION_SETS
from tests.engine import native
from tests.servers.process import this_machine
from tests.servers.rule import apt_installs

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = "g++-aarch64-linux-gnu qemu-user"
JOINING = ("-std=c++17", "-O1", "-fexpensive-optimizations", "-w")
"""With less, g++ joins no product with a sum."""
ARGUMENTS = ("1", "3", "4")
"""As many rounds as the sanitizers look at."""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def emulator() -> str:
    """Where it is; it is installed with the compiler if needed."""
    machine = this_machine()
    if not (machine.program(COMPILER) and machine.program(EMULATOR)):
        apt_installs(PACKAGES, machine)
    found = machine.program(EMULATOR)
    if found is None or machine.program(COMPILER) is None:
        pytest.fail(f"These tests need {COMPILER} and {EMULATOR}: apt-get install {PACKAGES}.", pytrace=False)
    return found


def ran(command: list[str | Path]) -> tuple[list[str], str]:
    """The instruction sets that a soak test has run, and the digest of what the portable one computed."""
    done = subprocess.run([*command, *ARGUMENTS], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    *numbers, digest = done.stdout.split()
    names = {number: name for name, number in INSTRUCTION_SETS.items()}
    return [names[int(number)] for number in numbers], digest


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("cortex-a72", ["portable"]),
        ("neoverse-n1", ["portable", "arm_dot"]),
        ("max", ["portable", "arm_dot", "arm_i8mm"]),
    ],
)
def test_each_cpu_runs_what_it_has_with_the_same_results_bit_by_bit(
    emulator: str, cpu: str, expected: list[str]
) -> None:
    """With the products and sums joined, as the decoder is built."""
    found, _ = ran([emulator, "-cpu", cpu, native.built(COMPILER, *JOINING, "-static")])
    assert found == expected


def test_arm_computes_what_this_machine_computes(emulator: str) -> None:
    apart = (*native.QUICK, native.ONE_ROUNDING)
    there = ran([emulator, "-cpu", "max", native.built(COMPILER, *apart, "-static")])
    here = ran([native.built("g++", *apart)])
    assert there[1] == here[1]
