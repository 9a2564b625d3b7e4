"""What was compiled: instructions of libraries against the machine, and every Triton kernel for every GPU."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optigpu.conductor.outcome import builds_of
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Accelerator
from optigpu.engines import install
from optigpu.engines.install import (
    LIBRARIES,
    TOO_LARGE,
    EngineLibrary,
    Machine,
    build_facts,
    counted,
    cuda_architectures,
    mentions,
)
from optigpu.hardware import probe
from optigpu.hardware.catalog import capabilities
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.ops.launch import Example
from tools.kernels.compiling import Compiled
from tools.kernels.sources import examples_of
from tools.kernels.table import faults, row_of

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
    assert plain.instructions == dict.fromkeys(install.SETS, 0)


def test_what_cannot_be_counted_has_its_reason(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    assert counted(text).reason == "objdump cannot read text.so."
    monkeypatch.setattr(install, "LARGEST_BYTES", 10)
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


@pytest.mark.slow
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


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
CARDS = {each.name: each for each in capabilities()}
AGAIN = "sm_90"
"""The capability for which everything is compiled in each run."""
SMALL = Compiled(registers=32, spilled_bytes=0, shared_bytes=0, threads=128, loaded_bytes=16, ptx="")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows that the tool writes now; it ends with status 0.

    Published ones whose kernel, launch and compiler have not changed are taken over, but for one capability.
    """
    folder = tmp_path_factory.mktemp("kernels")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tools.kernel_table", "--output", str(folder), "--processes", "1"),
            *("--published", str(RESULTS / "kernels.json"), "--again", AGAIN),
            *("--page", str(folder / "kernels.md")),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    rows: list[dict[str, Any]] = json.loads((folder / "kernels.json").read_text())["rows"]
    page = (folder / "kernels.md").read_text()
    for row in rows:
        assert f"## {row['kernel']}\n" in page
        assert f"| {row['example']} | {row['capability']} | " in page
    return rows


def names_of(rows: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    return {(row["file"], row["kernel"], row["example"], row["capability"]) for row in rows}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_every_card_within_its_limits(table: list[dict[str, Any]]) -> None:
    assert {row["capability"] for row in table} == set(CARDS)
    for row in table:
        assert row["faults"] == [], row
        if row["reason"] is None:
            assert row["blocks"] >= 1, row
        else:
            assert row["reason"] == f"{row['capability']} has no bfloat16"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_published_table_has_these_kernels_and_no_others(table: list[dict[str, Any]]) -> None:
    published = json.loads((RESULTS / "kernels.json").read_text())["rows"]
    assert names_of(published) == names_of(table), "run python -m tools.kernel_table and commit docs/results"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_published_figures_are_those_that_are_compiled_now(table: list[dict[str, Any]]) -> None:
    published = {row["digest"]: row for row in json.loads((RESULTS / "kernels.json").read_text())["rows"]}
    again = [row for row in table if row["capability"] == AGAIN]
    assert again
    for row in again:
        assert published.get(row["digest"], row) == row, (
            "run python -m tools.kernel_table and commit docs/results"
        )


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_a_fault() -> None:
    example = examples_of("norm.triton_norm", CARDS["sm_90"])[0]
    call = replace(example.call, constants={**example.call.constants, "BLOCK": 1000})  # no power of two
    row = row_of("norm.triton_norm", Example("broken", call), CARDS["sm_90"])
    assert row.reason == "it does not compile"
    assert row.faults[0].startswith("it does not compile: ")


@pytest.mark.parametrize(
    ("card", "done", "words"),
    [
        (
            "sm_90",
            replace(SMALL, spilled_bytes=9),
            "9 bytes of registers spilled by a thread, and 8 are allowed",
        ),
        ("sm_80", replace(SMALL, registers=200, threads=512), "102400 registers of a block, and 65536"),
        ("sm_75", replace(SMALL, shared_bytes=65_537), "65537 bytes of shared memory of a block, and 65536"),
    ],
)
def test_what_is_beyond_a_card_is_a_fault(card: str, done: Compiled, words: str) -> None:
    (fault,) = faults(done, 8, CARDS[card])
    assert fault.startswith(words)
    assert faults(SMALL, 8, CARDS[card]) == []
