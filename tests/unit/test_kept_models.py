"""Kept models that cannot be read are removed; errors of something else leave them."""

from pathlib import Path

import pytest

from optigpu.backends.converted import whole
from optigpu.vocabulary import OptiGPUError, UnsupportedError


@pytest.fixture(params=["file", "folder"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model that was written as one file, or as a folder of files."""
    path = tmp_path / "model.kept"
    if request.param == "folder":
        path.mkdir()
        (path / "weights").write_bytes(b"half")
    else:
        path.write_bytes(b"half")
    return path


@pytest.mark.parametrize(
    "error", [RuntimeError("no graph.\nmore"), ValueError("no graph"), OSError("no graph")]
)
def test_a_model_that_cannot_be_read_is_removed(kept: Path, error: Exception) -> None:
    said = (
        r"Engine cannot load model\.kept: no graph\. .* was damaged and has been removed; run the job again"
    )
    with pytest.raises(OptiGPUError, match=said), whole(kept, "Engine"):
        raise error
    assert not kept.exists()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("std::bad_alloc"), MemoryError(), UnsupportedError("no such type"), KeyError("a bug")],
)
def test_an_error_that_says_nothing_of_the_model_leaves_it(kept: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, whole(kept, "Engine"):
        raise error
    assert raised.value is error
    assert kept.exists()
