"""The data of a calibration, as the conversion's process reads it: what is wrong with it is one sentence."""

from pathlib import Path

import numpy as np
import pytest

from optigpu.edge.convert.child.answers import RefusalError
from optigpu.edge.convert.child.data import (
    chosen,
    image_paths,
    npz_inputs,
    random_inputs,
    require_different,
    split,
)

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


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no archive", b"\x93NUMPY"])
def test_a_file_that_is_no_npz_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(RefusalError, match=r"is not an \.npz file"):
        npz_inputs(path, SHAPE)


def test_an_array_without_its_archive_is_one_sentence(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.zeros((2, *SHAPE)))
    with pytest.raises(RefusalError, match="it is a single array"):
        npz_inputs(tmp_path / "data.npy", SHAPE)


def test_an_archive_that_is_truncated_is_one_sentence(tmp_path: Path) -> None:
    whole = saved(tmp_path / "data.npz", inputs=np.zeros((9, *SHAPE))).read_bytes()
    for length in range(4, len(whole), 97):
        (tmp_path / "data.npz").write_bytes(whole[:length])
        with pytest.raises(RefusalError, match=r"is not an \.npz file"):
            npz_inputs(tmp_path / "data.npz", SHAPE)


def test_a_folder_without_images_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(RefusalError, match="has no images"):
        image_paths(tmp_path)


def test_images_of_all_subfolders_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "a/1.jpg", "b/1.png", "a/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in image_paths(tmp_path)] == [
        "a/1.jpg",
        "b/1.png",
        "b/2.PNG",
    ]


def test_a_fifth_is_held_out_and_nothing_is_in_both() -> None:
    samples = np.arange(100, dtype=np.float32)[:, None]
    calibration, held_out = split(samples, 50, np.random.default_rng(0))
    assert (len(calibration), len(held_out)) == (50, 20)
    assert not set(calibration[:, 0]) & set(held_out[:, 0])


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (4, 1), (10, 2), (1000, 64)])
def test_between_1_and_64_are_held_out(count: int, held_out: int) -> None:
    assert len(split(np.zeros((count, 1), np.float32), 10**6, np.random.default_rng(0))[1]) == held_out


@pytest.mark.parametrize("count", [0, 1])
def test_a_single_sample_is_too_few(count: int) -> None:
    with pytest.raises(RefusalError, match="needs at least 2 samples"):
        split(np.zeros((count, 1), np.float32), 8, np.random.default_rng(0))


def test_only_so_many_files_are_read_as_are_needed() -> None:
    random = np.random.default_rng(0)
    assert len(chosen(10_000, 128, random)) == 160
    assert chosen(3, 128, random) == [0, 1, 2]


@pytest.mark.parametrize(("pixels", "low", "high"), [("signed", -1, 1), ("unit", 0, 1), ("bytes", 0, 255)])
def test_random_pictures_differ_and_stay_in_the_range(pixels: str, low: float, high: float) -> None:
    made = random_inputs(8, (16, 16, 3), pixels, np.random.default_rng(3))
    assert made.shape == (8, 16, 16, 3)
    assert low <= made.min() < made.max() <= high
    means = made.mean(axis=(1, 2))
    assert np.ptp(means) > 0.05 * (high - low)
    assert np.array_equal(made, random_inputs(8, (16, 16, 3), pixels, np.random.default_rng(3)))


def test_samples_that_are_all_equal_are_refused() -> None:
    require_different(np.arange(2, dtype=np.float32))
    require_different(np.ones((1, 3), np.float32))
    with pytest.raises(
        RefusalError, match=r"^All 4 samples are equal, so they say nothing of the data's range"
    ):
        require_different(np.ones((4, 3), np.float32))
