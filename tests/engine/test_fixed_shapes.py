"""Models that are converted for one shape: a file for each, and a stack that changes weights is refused."""

import json
from pathlib import Path

import pytest

from optigpu.backends.converted import Converter
from optigpu.backends.coreml.package import PACKAGES
from optigpu.backends.fixed_shapes import FixedShapes
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import UnsupportedError
from tests.engine.caches import cache_with
from tests.engine.converted_engines import ordered

CONVERTER = Converter("shapes", "tests.engine.children.fixed_shapes", ".json", (), ())
ROOT = Path(__file__).parents[2]


def test_a_model_is_written_once_for_each_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path).parent))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    order, shapes = ordered(tmp_path, seed=3, threads=2), FixedShapes(CONVERTER, "writing")
    made = [shapes.made(order, 2, length, said.append) for length in (64, 64, 65)]
    assert made[0] == made[1] != made[2]
    assert said == ["writing", "writing"]
    assert json.loads(made[0].read_text("ascii")) == {
        "model": "bundled:tiny",
        "seed": 3,
        "threads": 2,
        "rows": 2,
        "length": 64,
    }


def test_a_stack_that_changes_weights_is_refused(tmp_path: Path) -> None:
    PACKAGES.admit(ordered(tmp_path))
    with pytest.raises(UnsupportedError, match="runs float32 alone here, not bfloat16; leave the technique"):
        PACKAGES.admit(ordered(tmp_path, VllmBf16()))
