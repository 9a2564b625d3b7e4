"""The techniques of openvino: how weights are stored and multiplied, and what keys and values are kept in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from optigpu.backends.openvino.settings import form_of, properties_of
from optigpu.hardware.cpu import has_vnni
from optigpu.models.described import decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Technique, engine_options
from optigpu.techniques.memory.openvino_kv_cache import OpenVinoKvCache
from optigpu.techniques.quantization.openvino_int4 import OpenVinoInt4
from optigpu.techniques.quantization.openvino_int8 import OpenVinoInt8
from optigpu.vocabulary import DeviceKind
from tests.engine.converted_engines import TINY, error, own_cache, prepared, prompts, scored
from tests.engine.tiny_models import assert_needs_hook

FORMS = {
    "int8_asym": OpenVinoInt8(),
    "int8_sym": OpenVinoInt8(scheme="sym"),
    "int4_sym-128-all": OpenVinoInt4(),
    "int4_asym-32": OpenVinoInt4(scheme="asym", group=32, all_layers=False),
    "int4_sym-all": OpenVinoInt4(group=0),
}
BOUNDS = {
    "int8_asym": 0.05,
    "int8_sym": 0.05,
    "int4_sym-128-all": 0.5,
    "int4_asym-32": 0.3,
    "int4_sym-all": 0.7,
}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("openvino"))


def properties(*stack: Technique) -> dict[str, str]:
    return properties_of(engine_options(stack), 2)


@pytest.mark.parametrize("name", FORMS)
def test_weights_have_the_form_that_is_asked_for(name: str) -> None:
    technique = FORMS[name]

    def claim() -> None:
        assert form_of(engine_options([technique])).name == name

    assert_needs_hook(technique, "engine", claim)


def test_a_cache_has_the_numbers_that_are_asked_for() -> None:
    technique = OpenVinoKvCache(numbers="f16")

    def claim() -> None:
        assert properties(technique)["KV_CACHE_PRECISION"] == "f16"

    assert_needs_hook(technique, "engine", claim)


def test_float32_stays_exact_and_quantized_weights_leave_the_rest_to_openvino() -> None:
    exact, small, wide = properties(), properties(OpenVinoInt8()), properties(OpenVinoInt8(products="float"))
    assert (exact["INFERENCE_PRECISION_HINT"], exact["KV_CACHE_PRECISION"]) == ("f32", "f32")
    # In bfloat16, the default of a CPU with AMX, OpenVINO would round no activations to int8.
    assert (small["INFERENCE_PRECISION_HINT"], small["DYNAMIC_QUANTIZATION_GROUP_SIZE"]) == ("f32", "32")
    assert wide["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0"
    assert not {"INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"} & set(wide)
    assert "KV_CACHE_PRECISION" not in small
    assert exact["INFERENCE_NUM_THREADS"] == "2"


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize("name", FORMS)
def test_logits_are_rounded_alone(tmp_path: Path, name: str) -> None:
    tokens = prompts(2, 32)
    found = scored(prepared("openvino", tmp_path, FORMS[name]), tokens)
    assert 0 < error(found, scored(prepared("openvino", tmp_path), tokens)) < BOUNDS[name]


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("model", [TINY, "preset:tiny-llama-test"])
def test_the_bytes_of_weights_follow_from_their_shapes(tmp_path: Path, model: str, name: str) -> None:
    technique = FORMS[name]
    stored = technique.stored(decoder_shape(parse_reference(model)).stored(4), DeviceKind.CPU)
    found = prepared("openvino", tmp_path, technique, model=model).weights().bytes
    assert found == pytest.approx(stored.bytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.openvino
def test_what_is_left_in_8_bits_without_all_layers(tmp_path: Path) -> None:
    every = prepared("openvino", tmp_path, OpenVinoInt4()).notes.facts["openvino_constants"]
    some = prepared("openvino", tmp_path, OpenVinoInt4(all_layers=False)).notes.facts["openvino_constants"]
    assert "u8" not in every
    assert some["u8"] == 4, "the embedding, which is the head too, and the positions, with their offsets"
    assert every["i4"] == some["i4"] + 2


@pytest.mark.slow
@pytest.mark.openvino
def test_activations_are_rounded_where_the_facts_say_that_products_are_of_int8(tmp_path: Path) -> None:
    tokens = prompts(1, 32)
    narrow, wide = (prepared("openvino", tmp_path, OpenVinoInt8(products=kind)) for kind in ("int8", "float"))
    differs = error(scored(narrow, tokens), scored(wide, tokens)) > 0
    assert differs is has_vnni(), "OpenVINO rounds activations for VNNI alone"
    assert bool(narrow.notes.facts["openvino_dynamic_quantization_group"]) is differs
    assert wide.notes.facts["openvino_dynamic_quantization_group"] == 0
