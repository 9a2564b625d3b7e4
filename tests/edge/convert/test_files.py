"""The data of a calibration, and the files around a model: golden vectors, the C array, the folder of both."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from optigpu.documents.manifest import TensorFormat
from optigpu.edge.convert.child.answers import RefusalError
from optigpu.edge.convert.child.data import (
    npz_inputs,
    require_different,
)
from optigpu.edge.convert.process import c_array, publish, work_folder
from optigpu.edge.golden import GoldenPair, agreement, golden_of, parse_golden, read_golden
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
