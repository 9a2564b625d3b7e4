"""Which instructions a shared library has, counted in its disassembly, and which GPUs it has code for.

A library says of itself what it was configured with; its file says what the compiler made of it.
"""

import hashlib
import mmap
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from optigpu.paths import cache_dir
from optigpu.vocabulary import Frozen

SETS = {
    "avx2": b"%ymm",
    "avx512": b"%zmm",
    "vnni": b"vpdp(?:busd|wssd)",
    "bf16": b"vdpbf16ps",
    "amx": b"tdp(?:b|f)",
}
"""Sets of instructions, and what an instruction of each has in it as objdump writes it: a register, or its name."""
LARGEST_BYTES = 150 * 2**20
"""A larger file takes minutes to disassemble."""
NO_OBJDUMP = "objdump is not installed (on Debian and Ubuntu: apt-get install binutils)."
TOO_LARGE = "The file is larger than is disassembled here."
_CHUNK = 2**22
_FATBIN_SECTION, _FATBIN_MAGIC = b".nv_fatbin", 0xBA55ED50
_PTX, _ELF = 1, 2


class Counted(Frozen):
    """Instructions of a library by SETS; null with the reason why they were not counted."""

    instructions: dict[str, int] | None
    reason: str | None = None


def counted(library: Path) -> Counted:
    """Counted once: what is known of a file that has not changed is kept in the cache folder."""
    status = library.stat()
    if status.st_size > LARGEST_BYTES:
        return Counted(instructions=None, reason=TOO_LARGE)
    key = repr((str(library.resolve()), status.st_size, status.st_mtime_ns, SETS))
    note = cache_dir() / "builds" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    try:
        return Counted.model_validate_json(note.read_bytes())
    except (OSError, ValidationError):
        found = _disassembled(library)
    if found.instructions is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(found.model_dump_json(), "utf-8")
    return found


def mentions(library: Path, text: bytes) -> bool:
    """Whether a file has these bytes, as names of functions that were compiled for a set of instructions."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def _disassembled(library: Path) -> Counted:
    command = shutil.which("objdump")
    if command is None:
        return Counted(instructions=None, reason=NO_OBJDUMP)
    found = dict.fromkeys(SETS, 0)
    patterns = {name: re.compile(text + b"[^\n]*") for name, text in SETS.items()}
    arguments = [command, "-d", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        rest = b""
        while chunk := process.stdout.read(_CHUNK):
            lines, _, rest = (rest + chunk).rpartition(b"\n")
            for name, pattern in patterns.items():
                found[name] += len(pattern.findall(lines))
    if process.returncode:
        return Counted(instructions=None, reason=f"objdump cannot read {library.name}.")
    return Counted(instructions=found)


def cuda_architectures(library: Path) -> tuple[str, ...]:
    """What a library has code for: "sm_90" for a GPU's own, "compute_90" for what a driver can compile further.

    Read from the headers in the section .nv_fatbin; empty where there is none.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = _section(content)
        return tuple(sorted(set(_entries(content, *place)))) if place else ()


def _section(content: mmap.mmap) -> tuple[int, int] | None:
    """Where the section of GPU code begins and ends in a file of ELF with 64 bits."""
    if content[:5] != b"\x7fELF\x02":
        return None
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count, names = struct.unpack_from("<HHH", content, 0x3A)
    (texts,) = struct.unpack_from("<Q", content, table + names * size + 0x18)
    for number in range(count):
        header = table + number * size
        name = texts + struct.unpack_from("<I", content, header)[0]
        if content[name : name + len(_FATBIN_SECTION) + 1] == _FATBIN_SECTION + b"\0":
            start, length = struct.unpack_from("<QQ", content, header + 0x18)
            return start, start + length
    return None


def _entries(content: mmap.mmap, start: int, end: int) -> Iterator[str]:
    """The architectures of the code in a section: containers one after the other, each with entries."""
    place = content.find(struct.pack("<I", _FATBIN_MAGIC), start, end)
    while place >= 0:
        header, length = struct.unpack_from("<HQ", content, place + 6)
        entry, last = place + header, place + header + length
        while entry + 32 <= min(last, end):
            kind, _, head, size = struct.unpack_from("<HHIQ", content, entry)
            (number,) = struct.unpack_from("<I", content, entry + 28)
            if kind in (_PTX, _ELF):
                yield f"{'compute' if kind == _PTX else 'sm'}_{number}"
            if not head:
                break
            entry += head + size
        place = content.find(struct.pack("<I", _FATBIN_MAGIC), max(last, place + 8), end)
