"""The data of a calibration, and the files around a model: golden vectors, the C array, the folder of both, and the
manifest: consistent with itself, what fits on a board by it, and the prediction from published figures."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.documents.manifest import ModelManifest, TensorFormat, read_manifest
from optigpu.edge.convert.child.answers import RefusalError
from optigpu.edge.convert.child.data import (
    npz_inputs,
    require_different,
)
from optigpu.edge.convert.process import c_array, publish, work_folder
from optigpu.edge.fit import (
    Place,
    check_claim,
    fastest_published,
    fit,
    fit_board,
    predict,
)
from optigpu.edge.gate import GoldenPair, agreement, golden_of, parse_golden, read_golden
from optigpu.hardware.catalog import Board, board, boards
from optigpu.vocabulary import SpecError

FILE = b"OGLD" + bytes([2, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0]) + b"\x00\x01\x02\x80\x7f\xff\xfe\xfd\x01\x02"
PAIRS = (GoldenPair(b"\x00\x01\x02", b"\x80\x7f"), GoldenPair(b"\xff\xfe\xfd", b"\x01\x02"))
PROBABILITIES = TensorFormat(shape=(1, 2), dtype="int8", scale=1 / 256, zero_point=-128)


def test_golden_vectors_are_the_bytes_of_the_contract(tmp_path: Path) -> None:
    (tmp_path / "golden.bin").write_bytes(FILE)
    assert read_golden(tmp_path / "golden.bin") == PAIRS
    assert golden_of(PAIRS).outputs == ("807f", "0102")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"OGLD",
        FILE[:-1],
        FILE + b"\x00",
        b"XXXX" + FILE[4:],
        b"OGLD" + b"\xff" * 12,
        b"OGLD" + bytes(12),
    ],
)
def test_what_holds_no_golden_vectors_is_refused(data: bytes) -> None:
    with pytest.raises(SpecError, match="golden"):
        parse_golden(data, "golden.bin")


@pytest.mark.slow
def test_the_c_array_compiles_and_holds_the_model(tmp_path: Path) -> None:
    model = bytes(range(256)) * 3 + b"\x07"
    source, header = c_array("tiny", model)
    (tmp_path / "tiny.cc").write_text(source)
    (tmp_path / "tiny.h").write_text(header)
    (tmp_path / "main.cc").write_text(
        '#include "tiny.h"\n#include <cstdint>\n#include <cstdio>\n'
        "int main() { if ((std::uintptr_t)tiny % 16) return 1; std::fwrite(tiny, 1, tiny_len, stdout); }\n"
    )
    program = tmp_path / "program"
    subprocess.run(["g++", "-Wall", "-Werror", "main.cc", "tiny.cc", "-o", program], cwd=tmp_path, check=True)
    assert subprocess.run([program], capture_output=True, check=True).stdout == model


def test_probabilities_agree_by_hand() -> None:
    """0.75 and 0.25 against 192/256 and 64/256; 0.5 and 0.5 against 128/256 and a zero that counts as half a step."""
    floats = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    found = agreement(floats, np.array([[64, -64], [0, -128]], np.int8), PROBABILITIES)
    assert (found.samples, found.top1) == (2, 1.0)
    zero = 1 / 512
    total = 0.5 + zero
    expected = 0.5 * np.log(0.5 / (0.5 / total)) + 0.5 * np.log(0.5 / (zero / total))
    assert found.kld_mean == pytest.approx(expected / 2)


@pytest.mark.parametrize(
    ("floats", "reason"),
    [
        (np.zeros((2, 4, 4), np.float32), "no distribution over classes"),
        (np.zeros((2, 1), np.float32), "no distribution over classes"),
        (np.full((2, 3), np.nan, np.float32), "NaN"),
        (np.tile(np.array([[0.2, 0.8]], np.float32), (3, 1)), "the same to each"),
    ],
)
def test_what_cannot_be_compared_has_a_reason(floats: np.ndarray, reason: str) -> None:
    found = agreement(floats, np.zeros(floats.shape, np.int8), PROBABILITIES)
    assert (found.top1, found.kld_mean) == (None, None)
    assert reason in str(found.reason)


def test_files_appear_together_and_the_manifest_last(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with work_folder(output) as folder:
        for name in ("manifest.json", "a.tflite"):
            (folder / name).write_text(name)
        assert not output.exists()
        publish(folder, ("manifest.json", "a.tflite"), output)
    assert sorted(os.listdir(output)) == ["a.tflite", "manifest.json"]
    assert os.listdir(tmp_path) == ["out"]


def test_other_files_of_the_output_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "manifest.json").write_text("old")
    with work_folder(tmp_path) as folder:
        (folder / "manifest.json").write_text("new")
        publish(folder, ("manifest.json",), tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "mine.txt": "mine",
        "manifest.json": "new",
    }


def write_and_fail(output: Path) -> None:
    with work_folder(output) as folder:
        (folder / "a.tflite").write_text("half")
        raise RuntimeError


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        write_and_fail(tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("output", ["/proc/none/out", "/dev/null", "x" * 300])
def test_an_output_that_cannot_be_written_is_one_sentence(output: str) -> None:
    with pytest.raises(SpecError, match=f"--output {re.escape(output)}"), work_folder(Path(output)):
        pass


SHAPE = (4, 4, 3)


def saved(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, allow_pickle=True, **arrays)
    return path


def test_the_inputs_of_an_npz_file_are_read_by_name_or_because_they_are_alone(tmp_path: Path) -> None:
    samples = np.arange(96, dtype=np.uint8).reshape(2, *SHAPE)
    alone = npz_inputs(saved(tmp_path / "a.npz", anything=samples), SHAPE)
    named = npz_inputs(saved(tmp_path / "b.npz", inputs=samples, labels=np.zeros(2)), SHAPE)
    assert alone.dtype == np.float32
    assert np.array_equal(alone, samples)
    assert np.array_equal(named, samples)


def with_nan() -> np.ndarray:
    samples = np.zeros((2, *SHAPE), np.float32)
    samples[1, 0, 0, 0] = np.nan
    samples[1, 0, 0, 1] = np.inf
    return samples


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (
            {"x": np.zeros((2, 4, 4, 1))},
            r"x has the shape \[2, 4, 4, 1\], and the network takes \[samples, 4, 4, 3\]",
        ),
        ({"x": np.zeros(3)}, r"x has the shape \[3\]"),
        ({"x": with_nan()}, "x holds 2 values that are NaN or infinite"),
        ({"x": np.full((1, *SHAPE), "a")}, "save it as float32"),
        ({"x": np.zeros((1, *SHAPE), np.complex64)}, "save it as float32"),
        ({"x": np.zeros(1), "y": np.zeros(1)}, "has the arrays x, y; name one inputs"),
        ({"x": np.array([{}], dtype=object)}, "is not an .npz file with an array"),
        ({}, "is not an .npz file with an array"),
    ],
)
def test_a_wrong_npz_file_is_one_sentence(
    tmp_path: Path, arrays: dict[str, np.ndarray], sentence: str
) -> None:
    with pytest.raises(RefusalError, match=sentence) as caught:
        npz_inputs(saved(tmp_path / "data.npz", **arrays), SHAPE)
    assert caught.value.wrong


def test_an_archive_that_is_truncated_is_one_sentence(tmp_path: Path) -> None:
    whole = saved(tmp_path / "data.npz", inputs=np.zeros((9, *SHAPE))).read_bytes()
    for length in range(4, len(whole), 97):
        (tmp_path / "data.npz").write_bytes(whole[:length])
        with pytest.raises(RefusalError, match=r"is not an \.npz file"):
            npz_inputs(tmp_path / "data.npz", SHAPE)


def test_samples_that_are_all_equal_are_refused() -> None:
    require_different(np.arange(2, dtype=np.float32))
    require_different(np.ones((1, 3), np.float32))
    with pytest.raises(
        RefusalError, match=r"^All 4 samples are equal, so they say nothing of the data's range"
    ):
        require_different(np.ones((4, 3), np.float32))


OPERATORS = [
    {"name": "CONV_2D", "count": 35, "macs": 9_074_304},
    {"name": "DEPTHWISE_CONV_2D", "count": 17, "macs": 1_579_824},
    {"name": "FULLY_CONNECTED", "count": 1, "macs": 12_800},
    {"name": "MEAN", "count": 1, "macs": 0},
]


def document(**changed: Any) -> dict[str, Any]:
    """MobileNetV2 of width 0.35 at 96x96, as JSON, with some fields changed."""
    return {
        "schema": 1,
        "sha256": "ab" * 32,
        "network": {"family": "mobilenet_v2", "alpha": "0.35", "input": [96, 96, 3], "classes": 10},
        "model_bytes": 646_136,
        "operators": OPERATORS,
        "macs": 10_666_928,
        "parameter_bytes": 415_912,
        "arena_bytes": 210_288,
        "input": {"shape": [1, 96, 96, 3], "dtype": "int8", "scale": 0.00784, "zero_point": -1},
        "output": {"shape": [1, 10], "dtype": "int8", "scale": 0.00390625, "zero_point": -128},
        "agreement": {"samples": 32, "top1": 0.97, "kld_mean": 0.002},
        "calibration": {"kind": "images", "samples": 100},
        "rankable": True,
        "golden": {"count": 2, "inputs_sha256": "cd" * 32, "outputs": ["00" * 10, "7f" * 10]},
        "tools": {"tensorflow-cpu": "2.21.0"},
    } | changed


def manifest(**changed: Any) -> ModelManifest:
    return ModelManifest.model_validate(document(**changed))


def test_a_manifest_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    made = manifest()
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(made.model_dump(mode="json")))
    assert json.loads(path.read_text())["schema"] == 1
    assert read_manifest(path) == made
    assert read_manifest(tmp_path) == made


def test_the_digest_of_golden_outputs_holds_the_run_s_id() -> None:
    golden = manifest().golden
    outputs = bytes(10) + b"\x7f" * 10
    assert golden.digest() == hashlib.sha256(outputs).hexdigest()
    assert golden.digest("run-1") == hashlib.sha256(b"run-1" + outputs).hexdigest()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"macs": 1}, "macs: It is not the sum"),
        ({"parameter_bytes": 10**6}, "parameter_bytes: The parameters cannot be larger"),
        (
            {"calibration": {"kind": "random", "samples": 9}},
            "rankable: A model that was calibrated with random",
        ),
        ({"sha256": "AB" * 32}, "sha256"),
        ({"schema": 2}, "schema"),
        ({"arena_bytes": 0}, "arena_bytes: 0 is too small; the least is 1."),
        ({"arena_bytes": -5}, "arena_bytes: -5 is too small"),
        ({"model_bytes": 2**41}, "model_bytes"),
        ({"unknown": 1}, "unknown: Unknown field 'unknown'."),
        ({"operators": []}, "operators"),
        ({"operators": [OPERATORS[0] | {"name": "A<script>"}], "macs": 9_074_304}, r"operators\.0\.name"),
        (
            {"golden": {"count": 1, "inputs_sha256": "cd" * 32, "outputs": ["00" * 9]}},
            "golden.outputs: Each must",
        ),
        ({"golden": {"count": 2, "inputs_sha256": "cd" * 32, "outputs": ["00" * 10]}}, "count is 2"),
        ({"golden": {"count": 1, "inputs_sha256": "cd" * 32, "outputs": ["0" * 19]}}, r"golden\.outputs\.0"),
        ({"input": {"shape": [1, 2**24, 2], "dtype": "int8", "scale": 1, "zero_point": 0}}, "too large"),
        ({"input": {"shape": [1, 4], "dtype": "float32", "scale": 1, "zero_point": 0}}, r"input\.dtype"),
        ({"input": {"shape": [1, 4], "dtype": "int8", "scale": 0, "zero_point": 0}}, r"input\.scale"),
        ({"input": {"shape": [1, 4], "dtype": "int8", "scale": 1, "zero_point": 128}}, r"input\.zero_point"),
        ({"agreement": {"samples": 4}}, "need values, or the reason"),
        ({"agreement": {"samples": 4, "top1": 1.5, "kld_mean": 0}}, r"agreement\.top1"),
        ({"network": {"family": "mobilenet_v2", "input": [96, 96, 3]}}, "needs its width multiplier"),
    ],
)
def test_what_is_wrong_is_named_by_its_field(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(document(**changed)))
    with pytest.raises(SpecError, match=sentence):
        read_manifest(path)


@pytest.mark.parametrize(("text", "sentence"), [("[]", "must hold one JSON object"), ("{", "is not JSON")])
def test_a_file_that_is_no_manifest_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=sentence):
        read_manifest(path)
    with pytest.raises(SpecError, match="cannot be read"):
        read_manifest(tmp_path / "none.json")


MACS = 10_666_928


def known(name: str) -> Board:
    found = board(name)
    assert found is not None
    return found


def test_a_small_arena_lies_in_sram_and_the_model_in_flash() -> None:
    found = fit_board(646_136, 210_288, known("esp32s3-n8"))
    # 8,388,608 - 2,097,152 of firmware - 262,144 of the agent - 646,136
    assert found.flash_left_bytes == 5_383_176
    # 327,680 - 61,440 of the agent's heap
    assert found.sram_bytes == 266_240
    assert (found.fits, found.arena, found.model_in_ram, found.reasons) == (True, Place.SRAM, None, ())


def test_what_is_larger_than_sram_needs_psram() -> None:
    assert not (without := fit_board(646_136, 300_000, known("esp32s3-n8"))).fits
    assert without.arena is None
    assert "fits neither SRAM nor PSRAM, 266,240 bytes at most" in without.reasons[0]
    within = fit_board(646_136, 300_000, known("esp32s3-n8r2"))
    assert (within.fits, within.arena, within.model_in_ram) == (True, Place.PSRAM, Place.PSRAM)
    assert within.reasons == ("The tensor arena lies in quad PSRAM, which is slower than SRAM.",)


def test_a_model_that_is_larger_than_the_flash_says_by_how_much() -> None:
    # 4,194,304 - 2,359,296 of firmware and agent = 1,835,008
    found = fit_board(3_500_000, 200_000, known("esp32s3-n4"))
    assert (found.fits, found.flash_left_bytes) == (False, -1_664_992)
    assert found.reasons[0].startswith("The model is 1,664,992 bytes larger than the flash")


def test_a_manifest_is_judged_against_all_boards_or_one() -> None:
    assert [each.board for each in fit(manifest()).boards] == [each.id for each in boards()]
    assert [each.board for each in fit(manifest(), "esp32s3-n8").boards] == ["esp32s3-n8"]
    with pytest.raises(SpecError, match=r"Unknown board 'esp32s3-n16r9'\. Did you mean esp32s3-n16r"):
        fit(manifest(), "esp32s3-n16r9")


def test_a_prediction_spans_the_published_rates() -> None:
    found = predict(MACS)
    assert found.low_s == pytest.approx(MACS * 0.054 / 7_157_888)
    assert found.high_s == pytest.approx(MACS * 1.434 / 56_000_000)
    assert (found.kind, round(found.low_s * 1e3), round(found.high_s * 1e3)) == ("prediction", 80, 273)
    assert found.max_fps == pytest.approx(1 / found.low_s)
    assert all("github.com/espressif" in each.sentence for each in found.figures)
    assert len(found.figures) == 2


def test_the_founding_claim_is_implausible_at_96_and_up() -> None:
    """MobileNetV2's MACs by Keras, in millions: width 0.35 and 1.0 at 96, width 1.0 at 224; and one at 48."""
    best = fastest_published()
    assert (best.name, best.cores, best.latency_s) == ("MobileNetV2", 2, 0.867)
    for macs in (MACS, 56_000_000, 300_000_000):
        found = check_claim(macs)
        assert not found.plausible
        assert (
            found.needed_macs_per_s == 50 * macs > found.published_macs_per_s == pytest.approx(300e6 / 0.867)
        )
        assert found.possible == (50 * macs <= 7.68e9)
    assert "50 FPS at 0.5 W are not" in check_claim(MACS).sentence
    assert "impossible here: 50 FPS of 300.0 million MACs take 15,000" in check_claim(300_000_000).sentence
    assert "at most 32.4 FPS" in check_claim(MACS).sentence
    assert check_claim(3_195_424).plausible
