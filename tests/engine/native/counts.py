"""Instructions and cache misses of the decoder, which no other work on the machine can change.

`python -m tests.engine.native.counts` records those of this tree: callgrind counts them, one prompt and one step at a
time, in the decoder as it is built for use. Its caches are those that are named here and not this machine's.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from optigpu.ops.decode.cpu.decoder import INSTRUCTION_SETS
from optigpu.ops.library_file import FLAGS
from tests.engine import native
from tests.engine.native.record import RECORD, Counts, Record, compiler

PROGRAM = Path(__file__).with_name("steps.cpp")
INSTRUCTIONS = INSTRUCTION_SETS["avx2"]
"""The newest that callgrind knows."""
CACHES = ("--I1=32768,8,64", "--D1=32768,8,64", "--LL=262144,16,64")
FAMILIES, KINDS, WHAT = (
    ("gpt2", "llama"),
    {"w4": 1, "w8": 2, "bf16": 0, "w4k": 3, "w3k": 4, "w5": 5, "w6": 6},
    ("step", "prompt"),
)


def cases() -> Iterator[str]:
    """Family, kind of weights, and what is done."""
    for family in FAMILIES:
        for kind in KINDS:
            for what in WHAT:
                yield f"{family} {kind} {what}"


def counted(case: str) -> Counts:
    """What callgrind counts in one case."""
    family, kind, what = case.split()
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise RuntimeError("The counts need valgrind: install it (Debian: apt-get install valgrind).")
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    program = native.built("g++", *flags, "-static", source=PROGRAM)
    with tempfile.TemporaryDirectory() as folder:
        command = [valgrind, "--tool=callgrind", "--cache-sim=yes", *CACHES, "--toggle-collect=counted"]
        command += [f"--callgrind-out-file={folder}/out", f"./{program.name}"]
        command += [str(INSTRUCTIONS), family, str(KINDS[kind]), what]
        # Variables and paths lie on the stack, and would move what is on it to other lines of a cache.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, cwd=program.parent, env={}
        )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return _read(done.stderr)


def _read(printed: str) -> Counts:
    """From the lines "Events : Ir Dr ..." and "Collected : 123 45 ..."."""
    lines = dict(re.findall(r"(Events|Collected)\s*:\s*(.+)", printed))
    found = dict(zip(lines["Events"].split(), map(int, lines["Collected"].split()), strict=True))
    return Counts(
        instructions=found["Ir"],
        first_cache_misses=found["I1mr"] + found["D1mr"] + found["D1mw"],
        last_cache_misses=found["ILmr"] + found["DLmr"] + found["DLmw"],
    )


def main() -> int:
    """Writes the record."""
    found = compiler()
    if found is None:
        print("The counts need g++.", file=sys.stderr)
        return 1
    record = Record(compiler=found, counts={case: counted(case) for case in cases()})
    RECORD.write_text(record.model_dump_json(indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
