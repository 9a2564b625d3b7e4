"""The technique of ctranslate2: the type that weights are stored and multiplied in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from optigpu.models.described import decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import engine_options
from optigpu.techniques.quantization.ctranslate2_int8 import Ctranslate2Int8
from optigpu.vocabulary import DeviceKind
from tests.engine.converted_engines import TINY, error, own_cache, prepared, prompts, scored
from tests.engine.tiny_models import assert_needs_hook

INT8 = Ctranslate2Int8()


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("ctranslate2"))


def test_weights_have_the_type_that_is_asked_for() -> None:
    def claim() -> None:
        assert engine_options([INT8]).weights == "int8_float32"

    assert_needs_hook(INT8, "engine", claim)


@pytest.mark.slow
@pytest.mark.ctranslate2
def test_logits_are_rounded_alone(tmp_path: Path) -> None:
    tokens = prompts(2, 32)
    found = scored(prepared("ctranslate2", tmp_path, INT8), tokens)
    assert 0 < error(found, scored(prepared("ctranslate2", tmp_path), tokens)) < 0.2


@pytest.mark.slow
@pytest.mark.ctranslate2
@pytest.mark.parametrize("model", [TINY, "preset:tiny-llama-test"])
def test_the_bytes_of_weights_follow_from_their_shapes(tmp_path: Path, model: str) -> None:
    stored = INT8.stored(decoder_shape(parse_reference(model)).stored(4), DeviceKind.CPU)
    found = prepared("ctranslate2", tmp_path, INT8, model=model).weights().bytes
    assert found == pytest.approx(stored.bytes, rel=0.02)
