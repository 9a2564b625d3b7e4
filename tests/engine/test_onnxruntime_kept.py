"""Kept ONNX models: written once, and replaced when damaged."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.converter_program import REFUSED, written
from optigpu.backends.onnxruntime.formats import DATA, MODEL
from optigpu.techniques.quantization.onnx_int4 import OnnxInt4
from optigpu.techniques.quantization.onnx_int8 import OnnxInt8
from optigpu.vocabulary import OptiGPUError, UnsupportedError
from tests.engine import converted_engines
from tests.engine.caches import cache_with
from tests.engine.converted_engines import ordered

pytestmark = [pytest.mark.onnxruntime, pytest.mark.slow]

BACKEND = BACKENDS["onnxruntime"]
prepared = partial(converted_engines.prepared, "onnxruntime")
SMALL = "preset:tiny-llama-test"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models are kept."""
    folder = cache_with(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return folder / "converted" / "onnxruntime"


@pytest.mark.usefixtures("converter_at_hand")
def test_a_model_is_written_once_for_each_format(tmp_path: Path, kept: Path) -> None:
    said: list[str] = []
    for stack in ((), (), (OnnxInt4(),), (OnnxInt8(),), (OnnxInt4(),)):
        BACKEND.prepare(ordered(tmp_path, *stack, model=SMALL), said.append)
    assert said.count("converting the model") == 3
    assert len(list(kept.glob("preset-tiny-llama-test-*.onnx"))) == 3


@pytest.mark.usefixtures("converter_at_hand")
@pytest.mark.parametrize("file", [MODEL, DATA])
@pytest.mark.parametrize("shorter", [True, False])
def test_a_damaged_model_is_removed_and_written_anew(
    tmp_path: Path, kept: Path, file: str, shorter: bool
) -> None:
    prepared(tmp_path, model=SMALL)
    (folder,) = kept.glob("*.onnx")
    path = folder / file
    whole = path.read_bytes()
    if not shorter and file == DATA:
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if shorter else b"\xff" * len(whole))
    with pytest.raises(OptiGPUError, match="was damaged and has been removed; run the job again"):
        prepared(tmp_path, model=SMALL)
    prepared(tmp_path, model=SMALL)
    assert path.read_bytes() == whole


def test_a_converter_s_status_says_what_happened(tmp_path: Path, capfd: Any) -> None:
    def refuse() -> None:
        raise UnsupportedError("Not this one.")

    def fail() -> None:
        raise PermissionError("no")

    assert written(refuse, tmp_path) == REFUSED
    assert capfd.readouterr().out == "Not this one.\n"
    assert written(lambda: None, tmp_path) == 0
    with pytest.raises(PermissionError):
        written(fail, tmp_path)
