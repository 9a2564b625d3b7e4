"""The library of each engine that computes, and how it is built right."""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optigpu.documents.facts import BuildFacts
from optigpu.documents.result import Accelerator
from optigpu.engines.environments import environment_of
from optigpu.hardware.instructions import counted, cuda_architectures, mentions

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
    found = _found(library, file, told)
    on_gpu = place / library.cuda if machine.gpu and library.cuda else None
    cuda = cuda_architectures(on_gpu) if on_gpu and on_gpu.is_file() else ()
    lacks = tuple(_lacking(library, found.instructions, machine)) + _lacking_cuda(cuda, machine.gpu)
    return found.model_copy(update={"cuda": cuda, "lacks": lacks, "build": library.build if lacks else None})


def _found(library: EngineLibrary, file: Path, told: str | None) -> BuildFacts:
    facts = BuildFacts(package=library.package, library=file.name)
    if library.just_in_time:
        return facts.model_copy(update={"reason": JUST_IN_TIME})
    count = counted(file)
    if count.instructions is not None:
        return facts.model_copy(update={"instructions": count.instructions})
    if library.mark is not None:
        has = {"avx512": int(mentions(file, library.mark))}
        return facts.model_copy(
            update={"instructions": has, "reason": f"{count.reason} 1 says that it has functions of the set."}
        )
    if told is not None:
        has = {name: int(text in told) for name, text in SAYS.items()}
        return facts.model_copy(
            update={"instructions": has, "reason": f"{count.reason} 1 is what the library says of itself."}
        )
    return facts.model_copy(update={"reason": count.reason})


def _lacking(library: EngineLibrary, instructions: dict[str, int] | None, machine: Machine) -> Iterator[str]:
    for name in library.uses if instructions is not None else ():
        there = any(flag in machine.features for flag in HAS[name])
        if there and not (instructions or {}).get(name):
            yield f"{name} instructions"


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
