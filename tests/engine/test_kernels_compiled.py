"""Every Triton kernel, compiled for every GPU of the catalog without one: it needs no more than the GPU has, and
docs/results/kernels.* has the kernels that there are."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from optigpu.hardware.catalog import Capability, capabilities
from optigpu.ops.kernel import Example
from optigpu.vocabulary import OptiGPUError
from tools.kernels.compiling import Compiled, digest_of, loaded_bytes, loops
from tools.kernels.sources import check_examples, examples_of, files, kernels_of, module_of
from tools.kernels.table import Row, blocks_at_once, faults, known_rows, lacking, row_of

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
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    rows: list[dict[str, Any]] = json.loads((folder / "kernels.json").read_text())["rows"]
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
    page = (RESULTS / "kernels.md").read_text()
    for row in published:
        assert f"## {row['kernel']}\n" in page
        assert f"| {row['example']} | {row['capability']} | " in page


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


def test_what_is_known_is_not_compiled_again_and_limits_hold_for_it() -> None:
    card = CARDS["sm_90"]
    example = examples_of("norm.triton_norm", card)[0]
    digest = digest_of(example.call, card)
    assert digest != digest_of(example.call, CARDS["sm_100"])
    assert digest != digest_of(replace(example.call, warps=2 * example.call.warps), card)
    known = Row(*("file", "kernel", "example", "sm_90"), None, 300, 0, 1024, 128, 1, 128 * 16, digest=digest)
    row = row_of("norm.triton_norm", example, card, {digest: known})
    assert (row.registers, row.shared_bytes, row.threads, row.digest) == (300, 1024, 128, digest)
    assert row.faults == ("300 registers of a thread, and 255 are allowed",)
    assert known_rows([asdict(known)], ["sm_90"]) == {}
    assert known_rows([asdict(known)]) == {digest: known}


def test_every_file_of_kernels_has_an_example_of_each() -> None:
    found = {
        file: [each.call.kernel.__name__ for each in examples_of(file, CARDS["sm_90"])] for file in files()
    }
    assert {"linear.triton_int8", "norm.triton_norm", "decode.cuda.triton_attention"} <= set(found)
    assert set(found["linear.triton_int8"]) == {"_int8_gemv", "_int8_gemm"}
    assert found["decode.cuda.triton_products"] == []
    assert kernels_of(module_of("decode.cuda.triton_attention")) == ["_attend", "_join"]


def test_a_kernel_without_an_example_or_with_two_of_a_name_is_refused() -> None:
    with pytest.raises(OptiGPUError, match=r"_new in optigpu/ops/linear/triton_new.py has no example: add"):
        check_examples("linear.triton_new", ["_old", "_new"], [("_old", "one")])
    with pytest.raises(OptiGPUError, match="_old has two examples called 'one'"):
        check_examples("linear.triton_new", ["_old"], [("_old", "one"), ("_old", "one")])


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
        ("sm_90", replace(SMALL, registers=256), "256 registers of a thread, and 255 are allowed"),
        ("sm_80", replace(SMALL, registers=200, threads=512), "102400 registers of a block, and 65536"),
        ("sm_80", replace(SMALL, threads=2048), "2048 threads of a block, and 1024 are allowed"),
        ("sm_75", replace(SMALL, shared_bytes=65_537), "65537 bytes of shared memory of a block, and 65536"),
        (
            "sm_86",
            replace(SMALL, shared_bytes=101_377),
            "101377 bytes of shared memory of a block, and 101376",
        ),
    ],
)
def test_what_is_beyond_a_card_is_a_fault(card: str, done: Compiled, words: str) -> None:
    (fault,) = faults(done, 8, CARDS[card])
    assert fault.startswith(words)
    assert faults(SMALL, 8, CARDS[card]) == []


@pytest.mark.parametrize(
    ("card", "done", "blocks"),
    [
        ("sm_90", SMALL, 16),  # threads
        ("sm_86", replace(SMALL, threads=32), 16),  # blocks
        ("sm_90", replace(SMALL, registers=128), 4),  # registers: 4096 for each of 16 warps
        ("sm_90", replace(SMALL, registers=129), 3),  # 4352 for each of 15 warps, by fours 12
        ("sm_75", replace(SMALL, shared_bytes=20_000), 3),
        ("sm_80", replace(SMALL, shared_bytes=81_920), 2),  # and 1 KiB each for the driver
        ("sm_80", replace(SMALL, shared_bytes=83_000), 1),
    ],
)
def test_blocks_fit_a_multiprocessor(card: str, done: Compiled, blocks: int) -> None:
    assert blocks_at_once(done, CARDS[card]) == blocks


def test_bfloat16_is_not_compiled_for_cards_without_it() -> None:
    assert_lacks("sm_75", ["rms, bfloat16, 4096"])
    assert_lacks("sm_80", [])


def assert_lacks(card: str, names: list[str]) -> None:
    capability: Capability = CARDS[card]
    found = examples_of("norm.triton_norm", capability)
    assert [each.name for each in found if lacking(each, capability) is not None] == names


PTX = """
ld.global.b32 %r9, [ %rd1 + 0 ];
$L__BB0_1:
@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
@%p1 ld.global.L1::evict_last.v2.b16 { %rs1, %rs2 }, [ %rd2 + 0 ];
cp.async.cg.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x10, %r6;
cp.async.ca.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x4, %r6;
@%p2 bra $L__BB0_1;
ret;
"""


def test_bytes_in_flight_are_those_of_the_loop_and_of_the_stages_before_it() -> None:
    assert len(loops(PTX)) == 1
    assert loaded_bytes(PTX, stages=3) == 16 + 4 + 2 * (16 + 4)
    nested = f"$L__BB0_0:\nld.global.v4.b64 %rd1, [ %rd2 ];\n{PTX}\n@%p3 bra $L__BB0_0;"
    assert len(loops(nested)) == 2
    assert loaded_bytes(nested, stages=3) == loaded_bytes(PTX, stages=3)
    assert loaded_bytes("ld.global.b8 %rs1, [ %rd1 + 0 ];\nret;", stages=3) == 1
