"""What a library was really built with: counted in files that a compiler makes here, and held against the machine."""

import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from optigpu.conductor.outcome import builds_of
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Accelerator
from optigpu.engines import libraries
from optigpu.engines.libraries import (
    LIBRARIES,
    NO_OBJDUMP,
    TOO_LARGE,
    EngineLibrary,
    Machine,
    build_facts,
    counted,
    cuda_architectures,
    mentions,
)
from optigpu.hardware import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec

PROGRAM = """
int dot(const unsigned char *a, const signed char *b, int n) {
    int sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}
"""
VNNI = Machine(("avx2", "avx512f", "avx512_vnni"))
Built = Callable[..., Path]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """A library, compiled with these flags; what is read of it is kept in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def build(name: str, *flags: str) -> Path:
        file = tmp_path / "dot.c"
        file.write_text(PROGRAM)
        library = tmp_path / name
        command = ["gcc", "-O3", "-shared", "-fPIC", *flags, str(file), "-o", str(library)]
        subprocess.run(command, check=True)
        return library

    return build


FULL = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")


def test_instructions_are_counted(built: Built) -> None:
    full, plain = counted(built("full.so", *FULL)), counted(built("plain.so"))
    assert full.instructions is not None
    assert full.instructions["vnni"] > 0
    assert full.instructions["avx512"] >= full.instructions["vnni"]
    assert full.instructions["amx"] == 0
    assert plain.instructions == dict.fromkeys(libraries.SETS, 0)


def test_a_file_is_looked_at_once_until_it_changes(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built("one.so", *FULL)
    first = counted(library)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert counted(library) == first
    built("one.so")
    assert counted(library).reason == NO_OBJDUMP


def test_what_cannot_be_counted_has_its_reason(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    assert counted(text).reason == "objdump cannot read text.so."
    monkeypatch.setattr(libraries, "LARGEST_BYTES", 10)
    large = counted(built("large.so"))
    assert (large.instructions, large.reason) == (None, TOO_LARGE)
    assert mentions(text, b"library")
    assert not mentions(text, b"AVX512")


@pytest.fixture
def engine(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineLibrary:
    """An engine whose library lacks what a right build of it has."""
    built("plain.so")
    made = EngineLibrary("some-engine", "plain.so", ("avx512", "vnni", "amx"), "make it right")
    monkeypatch.setitem(LIBRARIES, "torch", made)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    return made


def test_a_library_lacks_what_the_machine_has_and_a_right_build_uses(engine: EngineLibrary) -> None:
    found = build_facts("torch", VNNI)
    assert found is not None
    assert found.lacks == ("avx512 instructions", "vnni instructions"), "this machine has no AMX"
    assert found.build == "make it right"
    modest = build_facts("torch", Machine(("avx2",)))
    assert modest is not None
    assert (modest.lacks, modest.build) == ((), None)


def test_a_whole_build_lacks_nothing(
    engine: EngineLibrary, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    built("full.so", *FULL)
    monkeypatch.setitem(LIBRARIES, "torch", replace(engine, file="full.so"))
    found = build_facts("torch", VNNI)
    assert found is not None
    assert found.lacks == ()


def test_what_a_library_says_of_itself_counts_where_it_cannot_be_read(
    engine: EngineLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = build_facts("torch", VNNI, "CPU : AVX512 = 1 | LLAMAFILE = 1")
    assert found is not None
    assert found.lacks == ("vnni instructions",)
    assert str(found.reason).startswith(NO_OBJDUMP)
    silent = build_facts("torch", VNNI)
    assert silent is not None
    assert (silent.lacks, silent.instructions) == ((), None)


def test_an_engine_that_is_not_here_has_no_facts(
    engine: EngineLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIBRARIES, "torch", replace(engine, file="absent.so"))
    assert build_facts("torch", VNNI) is None
    assert build_facts("endpoint", VNNI) is None


def test_a_variant_has_its_engine_s_library_and_those_of_its_techniques(engine: EngineLibrary) -> None:
    document = {
        "workload": {"kind": "generate"},
        "model": "preset:tiny-llama-test",
        "stack": [{"name": "nf4"}],
    }
    (variant,) = variants_of(JobSpec.model_validate(document))[-1:]
    environment = probe().model_copy(update={"cpu_features": VNNI.features})
    (found,) = builds_of(variant, environment, RunFacts())
    assert found.package == "some-engine"
    assert found.lacks


def test_every_library_that_is_installed_here_can_be_read() -> None:
    """Those of this environment are fast on this machine, or say why that is not known. What was read is kept."""
    for name in LIBRARIES:
        found = build_facts(name, Machine(probe().cpu_features))
        if found is not None:
            assert found.instructions is not None or found.reason, name


def test_architectures_of_gpus_are_read_from_the_file(built: Built, tmp_path: Path) -> None:
    assert cuda_architectures(built("plain.so")) == ()
    library = _with_gpu_code(tmp_path, ((2, 80), (2, 90), (1, 90)))
    assert cuda_architectures(library) == ("compute_90", "sm_80", "sm_90")


@pytest.mark.parametrize(
    ("capability", "lacks"),
    [("8.0", ()), ("8.9", ()), ("9.0", ()), ("12.0", ()), ("7.5", ("code for sm_75",))],
)
def test_code_for_the_gpu_is_its_own_or_can_be_compiled_further(
    engine: EngineLibrary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    lacks: tuple[str, ...],
) -> None:
    _with_gpu_code(tmp_path, ((2, 80), (1, 90)))
    monkeypatch.setitem(LIBRARIES, "torch", replace(engine, cuda="gpu.so"))
    gpu = Accelerator(name="a GPU", memory_bytes=1, uuid="GPU-1", compute_capability=capability)
    found = build_facts("torch", Machine((), gpu))
    assert found is not None
    assert found.lacks == lacks


def _with_gpu_code(folder: Path, codes: tuple[tuple[int, int], ...]) -> Path:
    """A library with a section as nvcc writes it: a container of entries, each a kind and an architecture."""
    entries = b"".join(
        kind.to_bytes(2, "little") + b"\1\1" + (64).to_bytes(4, "little") + (8).to_bytes(8, "little") + bytes(12)
        + number.to_bytes(4, "little") + bytes(32) + bytes(8)
        for kind, number in codes
    )  # fmt: skip
    container = (0xBA55ED50).to_bytes(4, "little") + (1).to_bytes(2, "little") + (16).to_bytes(2, "little")
    (folder / "code.bin").write_bytes(container + len(entries).to_bytes(8, "little") + entries)
    text = f'.section .nv_fatbin, "a"\n.incbin "{folder / "code.bin"}"\n'
    (folder / "code.s").write_text(text)
    library = folder / "gpu.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(folder / "code.s"), "-o", str(library)], check=True)
    return library
