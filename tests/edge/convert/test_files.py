"""The files around a model: golden vectors, the C array, the folder that they are written into."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from optigpu.documents.manifest import TensorFormat
from optigpu.edge.convert.agreement import agreement
from optigpu.edge.convert.files import c_array, publish, work_folder
from optigpu.edge.golden import GoldenPair, golden_of, parse_golden, read_golden
from optigpu.vocabulary import SpecError

FILE = b"OGLD" + bytes([2, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0]) + b"\x00\x01\x02\x80\x7f\xff\xfe\xfd\x01\x02"
PAIRS = (GoldenPair(b"\x00\x01\x02", b"\x80\x7f"), GoldenPair(b"\xff\xfe\xfd", b"\x01\x02"))
PROBABILITIES = TensorFormat(shape=(1, 2), dtype="int8", scale=1 / 256, zero_point=-128)
LOGITS = TensorFormat(shape=(1, 2), dtype="int8", scale=0.5, zero_point=0)


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


def test_a_file_of_golden_vectors_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_golden(tmp_path / "none.bin")


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


def test_logits_are_compared_as_distributions() -> None:
    found = agreement(
        np.array([[2.0, 1.0], [1.0, 3.0]], np.float32), np.array([[4, 2], [6, 2]], np.int8), LOGITS
    )
    assert found.top1 == 0.5
    one, other = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(2.0))
    assert found.kld_mean == pytest.approx((one * np.log(one / other) + other * np.log(other / one)) / 2)


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


@pytest.mark.parametrize("output", ["/proc/none/out", "/dev/null"])
def test_an_output_that_cannot_be_written_is_one_sentence(output: str) -> None:
    with pytest.raises(SpecError, match=f"--output {re.escape(output)}"), work_folder(Path(output)):
        pass


def test_a_folder_in_the_place_of_a_file_is_one_sentence(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "a.tflite" / "full").mkdir(parents=True)
    with work_folder(output) as folder:
        (folder / "a.tflite").write_text("model")
        with pytest.raises(SpecError, match="cannot be written"):
            publish(folder, ("a.tflite",), output)
