"""Makes the environment of an engine as its recipe says; and the library of each engine that computes, and how it is
built right.

A library says of itself what it was configured with; its file says what the compiler made of it: which instructions it
has, counted in its disassembly, and which GPUs it has code for.
"""

import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, requires
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from optigpu.documents.facts import BuildFacts
from optigpu.documents.result import Accelerator
from optigpu.engines.environments import RECORD, SHARED, EngineEnvironment, Mended, Recipe, environment_of
from optigpu.hardware.cpu import cpu_features
from optigpu.paths import cache_dir
from optigpu.vocabulary import Frozen, OptiGPUError, UnsupportedError

HAS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "amx": ("amx_int8",),
}
"""The kernel's names of what a CPU has, by the set of instructions; one of them is enough."""
SAYS = {"avx512": "AVX512 = 1", "vnni": "AVX512_VNNI = 1", "amx": "AMX_INT8 = 1"}
"""How llama.cpp and its fork say that they have a set."""
JUST_IN_TIME = "It compiles its kernels when it runs, for the CPU that it finds; its file does not say which."


@dataclass(frozen=True)
class EngineLibrary:
    """`file` is a pattern from the folder of packages. `uses` are the sets that a right build has.

    `build` is the command that gets one. `mark` is in the names of functions of a library that is too large to count,
    where it has AVX-512. `just_in_time`: what it has cannot be read from its file. `cuda` is the file with code for
    GPUs.
    """

    package: str
    file: str
    uses: tuple[str, ...] = ()
    build: str = ""
    mark: bytes | None = None
    just_in_time: bool = False
    cuda: str | None = None


LIBRARIES: dict[str, EngineLibrary] = {
    "torch": EngineLibrary(
        "torch",
        "torch/lib/libtorch_cpu.so",
        ("avx512",),
        "pip install --force-reinstall torch",
        mark=b"6AVX512",
        cuda="torch/lib/libtorch_cuda.so",
    ),
    # Its products with AMX end in a segmentation fault (0.3.36): a right build has none, and that of make has none.
    "llama_cpp": EngineLibrary(
        "llama-cpp-python",
        "llama_cpp/lib/libggml-cpu.so",
        ("avx512", "vnni"),
        "pip uninstall -y llama-cpp-python && make llama",
    ),
    "ik_llama_cpp": EngineLibrary(
        "ik-llama-cpp-python",
        "ik_llama_cpp/lib/libggml.so",
        ("avx512", "vnni"),
        "optigpu engines remove ik_llama_cpp && optigpu engines install ik_llama_cpp",
    ),
    "onnxruntime": EngineLibrary(
        "onnxruntime",
        "onnxruntime/capi/libonnxruntime.so.*",
        ("avx512", "vnni"),
        "pip install --force-reinstall onnxruntime",
    ),
    "openvino": EngineLibrary("openvino", "openvino/libs/libopenvino_intel_cpu_plugin.so", just_in_time=True),
    "litert": EngineLibrary(
        "ai-edge-litert",
        "ai_edge_litert/libpywrap_litert_common.so",
        ("avx512", "vnni", "amx"),
        "pip install --force-reinstall ai-edge-litert",
    ),
    # Its build for CPUs brings a library for each of AVX2, AVX-512 and AMX, and loads the one that fits.
    "vllm": EngineLibrary(
        "vllm",
        "vllm/_C.abi3.so",
        build="optigpu engines remove vllm && optigpu engines install vllm",
        cuda="vllm/_C.abi3.so",
    ),
    "bitsandbytes": EngineLibrary(
        "bitsandbytes",
        "bitsandbytes/libbitsandbytes_cpu.so",
        ("avx512",),
        "pip install --force-reinstall 'bitsandbytes>=0.50'",
    ),
}
"""By the name of a backend, or of a package that a technique of torch computes with. torchao has none of its own: it
computes with torch's operators."""


@dataclass(frozen=True)
class Machine:
    """What libraries are held against: the flags of the CPU, and the GPU that is used."""

    features: Sequence[str]
    gpu: Accelerator | None = None


def build_facts(name: str, machine: Machine, told: str | None = None) -> BuildFacts | None:
    """What an engine's library was built with; None for one that is not known or not here.

    `told` is what the library says of itself, for where it cannot be counted.
    """
    library = LIBRARIES.get(name)
    environment = environment_of(name)
    place = environment.packages if environment else Path(sysconfig.get_path("platlib"))
    file = next(iter(sorted(place.glob(library.file))), None) if library else None
    if library is None or file is None:
        return None
    found = _instructions(library, file, told)
    has = found.instructions
    on_gpu = place / library.cuda if machine.gpu and library.cuda else None
    cuda = cuda_architectures(on_gpu) if on_gpu and on_gpu.is_file() else ()
    lacking = [
        f"{name} instructions"
        for name in library.uses
        if has is not None and not has.get(name) and set(HAS[name]) & set(machine.features)
    ]
    lacks = (*lacking, *_lacking_cuda(cuda, machine.gpu))
    build = library.build if lacks else None
    facts = found.model_dump() | {"cuda": cuda, "lacks": lacks, "build": build}
    return BuildFacts(package=library.package, library=file.name, **facts)


def _instructions(library: EngineLibrary, file: Path, told: str | None) -> "Counted":
    if library.just_in_time:
        return Counted(instructions=None, reason=JUST_IN_TIME)
    count = counted(file)
    if count.instructions is not None:
        return count
    has, how = {}, ""
    if library.mark is not None:
        has, how = {"avx512": int(mentions(file, library.mark))}, "says that it has functions of the set"
    elif told is not None:
        has = {name: int(text in told) for name, text in SAYS.items()}
        how = "is what the library says of itself"
    return Counted(instructions=has, reason=f"{count.reason} 1 {how}.") if has else count


def _lacking_cuda(found: Sequence[str], gpu: Accelerator | None) -> tuple[str, ...]:
    """A GPU runs code of its architecture, of an earlier one of its generation, and what can be compiled further."""
    if not found or gpu is None or gpu.compute_capability is None:
        return ()
    major, minor = map(int, gpu.compute_capability.split("."))
    for name in found:
        kind, _, number = name.partition("_")
        built = divmod(int(number), 10)
        if (kind == "compute" and built <= (major, minor)) or (built[0] == major and built[1] <= minor):
            return ()
    return (f"code for sm_{major}{minor}",)


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


_TAIL = 15


def install(recipe: Recipe, say: Callable[[str], None], jobs: int) -> EngineEnvironment:
    """The environment of an engine; made if it is not whole. Compilers run `jobs` at a time.

    `say` is told what goes on. Raises UnsupportedError where something must be installed first, and OptiGPUError when a
    step fails; what was begun is then removed at the next try.
    """
    environment = EngineEnvironment(recipe)
    _require(recipe)
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(environment.folder.with_suffix(".lock")):
        if not environment.is_whole:
            shutil.rmtree(environment.folder, ignore_errors=True)
            _make(environment, say, jobs)
            (environment.folder / RECORD).write_text(json.dumps(environment.identity), "utf-8")
            found = build_facts(recipe.name, Machine(cpu_features()))
            if found and found.lacks:
                lacks = " and ".join(found.lacks)
                say(f"{found.library} lacks {lacks}, which this CPU has; see install.log in its folder")
    return environment


def remove(recipe: Recipe) -> bool:
    """Removes an engine's environment; whether there was one."""
    folder = EngineEnvironment(recipe).folder
    was_there = folder.is_dir()
    shutil.rmtree(folder, ignore_errors=True)
    return was_there


def _require(recipe: Recipe) -> None:
    """Raises UnsupportedError for what is missing on this machine."""
    absent = [name for name in recipe.commands if shutil.which(name) is None]
    if absent:
        raise UnsupportedError(
            f"{recipe.name} is compiled here, and {' and '.join(absent)} cannot be found; install a C++ compiler with "
            "make (on Debian and Ubuntu: apt-get install build-essential), then run the command again."
        )
    # To look for the module pip would have setuptools give up its distutils in this process, which TorchInductor needs.
    if not any(distributions(name="pip")):
        raise UnsupportedError("pip is not in this environment; add it with: python -m ensurepip")
    place = EngineEnvironment(recipe).folder
    there = next(parent for parent in place.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < recipe.bytes:
        raise UnsupportedError(
            f"{recipe.name} takes about {recipe.bytes / 2**30:.1f} GiB, and {there} has {free / 2**30:.1f} GiB left; "
            "make room there, or set XDG_CACHE_HOME to a larger disk."
        )


def _make(environment: EngineEnvironment, say: Callable[[str], None], jobs: int) -> None:
    recipe = environment.recipe
    say("making the environment")
    # A PYTHONPATH would hide the environment's own packages.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    steps = _Steps(environment, {**kept, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs), **recipe.building})
    steps.run([sys.executable, "-m", "venv", "--without-pip", str(environment.folder)])
    wanted = [*recipe.packages]
    if recipe.shares:
        found = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
        own = dict.fromkeys(path for path in found if os.path.isdir(path))
        (environment.packages / SHARED).write_text("".join(f"{path}\n" for path in own), "utf-8")
    else:
        wanted += [line for line in requires("optigpu") or () if "extra ==" not in line]
    if wanted:
        say("installing packages")
        steps.pip("install", *wanted)
    for package in recipe.mended:
        say(f"compiling {package.name}, which takes about {recipe.minutes} minutes")
        _build(package, steps)
    if recipe.removes:
        steps.pip("uninstall", "--yes", *recipe.removes)


def _build(package: Mended, steps: "_Steps") -> None:
    """Installs a package from its source, with the files that it lacks."""
    with tempfile.TemporaryDirectory(prefix="optigpu-") as name:
        folder = Path(name)
        steps.pip("download", "--no-deps", "--no-binary", package.name, "--dest", name, package.requirement)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as content:
            content.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        for path, text in package.added.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_text(text, "utf-8")
        steps.pip("install", str(source))


@dataclass(frozen=True)
class _Steps:
    """Runs the programs of an installation; what they print is in install.log, in the environment's folder."""

    environment: EngineEnvironment
    variables: Mapping[str, str]

    def pip(self, *arguments: str) -> None:
        """OptiGPU's own pip, on the engine's environment."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.environment.python)]
        self.run([*pip, "--disable-pip-version-check", "--no-input", *arguments])

    def run(self, command: Sequence[str]) -> None:
        """Raises OptiGPUError, with the end of what was printed, when the program fails."""
        self.environment.folder.mkdir(exist_ok=True)
        log = self.environment.folder / "install.log"
        with log.open("a+", encoding="utf-8", errors="replace") as printed:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=self.variables,
            )
            if done.returncode:
                printed.seek(0)
                last = "\n".join(printed.read().strip().splitlines()[-_TAIL:])
                raise OptiGPUError(
                    f"{self.environment.recipe.name} could not be installed; all that was printed is in {log}. Its "
                    f"end:\n{last}"
                )
