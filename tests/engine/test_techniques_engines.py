"""The techniques of other engines: what each asks its engine for, and the bytes that it predicts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.ik_llama_cpp.engine import FILE_TYPES as IK_FILE_TYPES
from optigpu.backends.llama_cpp.gguf_facts import NEED_IMPORTANCE, ExactCaches, Form, asked_of, form_of
from optigpu.backends.onnxruntime import Format, format_of, graph_level_of
from optigpu.backends.openvino import form_of as openvino_form_of
from optigpu.backends.openvino import properties_of
from optigpu.backends.vllm import settings_of
from optigpu.documents.facts import ModelFacts
from optigpu.hardware import probe
from optigpu.hardware.cpu import has_vnni
from optigpu.job.spec import JobSpec
from optigpu.models.described import Part, decoder_shape, facts_of
from optigpu.models.reference import parse_reference
from optigpu.ops.layouts import nbits_bytes
from optigpu.techniques.base import GgufType, Technique, engine_options
from optigpu.techniques.compilation.onnx_graph import OnnxGraph
from optigpu.techniques.compilation.tensorflow_xla import TensorflowXla
from optigpu.techniques.kernels.llama_flash_attention import LlamaFlashAttention
from optigpu.techniques.memory.llama_kv_cache import LlamaKvCache
from optigpu.techniques.memory.llama_prompt_batch import LlamaPromptBatch
from optigpu.techniques.memory.openvino_kv_cache import OpenVinoKvCache
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.techniques.quantization.onnx_int4 import OnnxInt4
from optigpu.techniques.quantization.onnx_int8 import OnnxInt8
from optigpu.techniques.quantization.onnx_static_int8 import OnnxStaticInt8
from optigpu.techniques.quantization.openvino_int4 import OpenVinoInt4
from optigpu.techniques.quantization.openvino_int8 import OpenVinoInt8
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.breadth import cases, spread
from tests.engine.converted_engines import TINY, error, ordered, own_cache, prepared, prompts, scored
from tests.engine.tiny_models import assert_needs_hook

# ---- What each asks for.


LLAMA = "preset:tiny-llama-test"
PLAIN = LlamaFlashAttention(enabled=False)
OPENVINO_FORMS = {
    "int8_asym": (OpenVinoInt8(), 0.05),
    "int4_sym-128-all": (OpenVinoInt4(), 0.5),
    "int8_sym": (OpenVinoInt8(scheme="sym"), 0.05),
    "int4_asym-32": (OpenVinoInt4(scheme="asym", group=32, all_layers=False), 0.3),
    "int4_sym-all": (OpenVinoInt4(group=0), 0.7),
}
"""By name, and how far logits may be off."""


def llama_cpp(*stack: Technique) -> tuple[Any, ...]:
    """Keys, values, attention and how many tokens go through together, for a file of weights of 8 bits."""
    asked = asked_of(stack, "Q8_0", 1, ExactCaches())
    return asked.keys, asked.values, asked.attention, asked.together


def properties(*stack: Technique) -> dict[str, str]:
    return properties_of(engine_options(stack), 2)


def classifier(*stack: Technique) -> tuple[Any, ...]:
    options = engine_options(stack)
    return options.weights, options.products, options.calibrated_on


def vllm_dtype(*stack: Technique) -> str | None:
    facts = facts_of(parse_reference(LLAMA))
    assert facts is not None
    return settings_of(ordered(Path("/nowhere"), *stack, model=LLAMA), Path("/models"), facts).dtype


ASKED: list[tuple[Technique, Callable[..., Any], Any]] = [
    (Gguf(type="Q8_0", pure=True), lambda *stack: form_of(stack), Form("Q8_0", everywhere=True)),
    (LlamaFlashAttention(), llama_cpp, (None, None, "fused", None)),
    (PLAIN, llama_cpp, (None, None, "plain", None)),
    (LlamaKvCache(keys="F16", values="Q4_0"), llama_cpp, ("F16", "Q4_0", "fused", None)),
    (LlamaPromptBatch(tokens=16), llama_cpp, (None, None, None, 16)),
    (OnnxInt8(group_size=64), lambda *stack: format_of(stack), Format(8, 64, 4)),
    (OnnxInt4(group_size=128, products="float"), lambda *stack: format_of(stack), Format(4, 128, 1)),
    (OnnxGraph(level="basic"), lambda *stack: graph_level_of(stack), "basic"),
    (OnnxStaticInt8(images=3), classifier, ("int8", "int8", 3)),
    *(
        (technique, lambda *stack: openvino_form_of(engine_options(stack)).name, name)
        for name, (technique, _) in OPENVINO_FORMS.items()
    ),
    (OpenVinoKvCache(numbers="f16"), lambda *stack: properties(*stack)["KV_CACHE_PRECISION"], "f16"),
    (TensorflowXla(), lambda *stack: engine_options(stack).graph, "xla"),
    (VllmBf16(), vllm_dtype, "bfloat16"),
]
"""Techniques, what is read of an engine's settings, and what that must be."""


@pytest.mark.parametrize(("technique", "read", "expected"), ASKED, ids=[str(each[0]) for each in ASKED])
def test_the_engine_is_asked_for_what_the_technique_says(
    technique: Technique, read: Callable[..., Any], expected: Any
) -> None:
    def claim() -> None:
        assert read(technique) == expected

    assert_needs_hook(technique, "engine", claim)


@pytest.mark.parametrize("form", [Format(8, 32, 4), Format(4, 128, 1)], ids=str)
def test_a_format_is_read_from_its_name(form: Format) -> None:
    assert Format.parse(form.name) == form


# ---- llama.cpp and its fork.


def test_without_it_weights_are_float32_and_so_are_the_cache_and_the_attention() -> None:
    assert form_of(()) == Form("F32")
    asked = asked_of((), "F32", 2, ExactCaches())
    assert (asked.keys, asked.values, asked.attention, asked.together) == ("F32", "F32", "plain", None)
    free = asked_of((Gguf(),), "Q4_0", 2, ExactCaches())
    assert (free.keys, free.values, free.attention) == (None, None, None)


def test_values_of_few_bits_need_flash_attention() -> None:
    with pytest.raises(UnsupportedError, match="Only flash attention reads values"):
        asked_of((LlamaKvCache(), PLAIN), "Q4_0", 1, ExactCaches())
    exact = LlamaKvCache(keys="Q8_0", values="F16")
    assert asked_of((exact, PLAIN), "Q4_0", 1, ExactCaches()).attention == "plain"


def test_heads_that_are_no_whole_blocks_are_refused() -> None:
    facts = facts_of(parse_reference(LLAMA))
    assert facts is not None
    odd = ModelFacts(**{**vars(facts), "head_size": 24})
    for model, reason in ((facts, None), (odd, "blocks of 32 numbers, and this model's have 24")):
        found = LlamaKvCache().check(probe(), DeviceKind.CPU, model)
        assert found is None if reason is None else reason in str(found)
    assert LlamaKvCache(keys="F16", values="F16").check(probe(), DeviceKind.CPU, odd) is None


def test_parameters_that_came_later_leave_earlier_digests_as_they_were() -> None:
    assert Gguf().identity() == {"name": "gguf", "type": "Q4_0", "version": 1}
    assert Gguf(pure=True).identity()["pure"] is True


@pytest.mark.parametrize(
    ("backend", "kind", "words"),
    [
        ("llama_cpp", "IQ4_KS", "llama.cpp has no type IQ4_KS; ask for the backend ik_llama_cpp"),
        ("ik_llama_cpp", "TQ1_0", "ik_llama.cpp has no type TQ1_0; ask for the backend llama_cpp"),
        ("ik_llama_cpp", "IQ2_XXS", "needs to know how much each input matters"),
    ],
)
def test_a_type_that_an_engine_has_not_is_refused_when_a_job_is_posted(
    backend: str, kind: GgufType, words: str
) -> None:
    stack = [{"name": "gguf", "type": kind}]
    with pytest.raises(ValueError, match=words):
        JobSpec.model_validate(
            {"workload": {"kind": "generate"}, "model": LLAMA, "backend": backend, "stack": stack}
        )


def test_each_type_has_an_engine_and_the_fork_knows_the_numbers_of_its_own() -> None:
    engines = BACKENDS["llama_cpp"], BACKENDS["ik_llama_cpp"]
    for kind in get_args(GgufType):
        takes = [engine.supports(Generate(), Gguf(type=kind)) is None for engine in engines]
        assert any(takes), kind
        assert takes[1] == (kind in IK_FILE_TYPES), kind
        assert not (kind in NEED_IMPORTANCE and takes[1])


def test_bytes_of_a_file_follow_from_shapes_where_its_mixture_is_known() -> None:
    plain = decoder_shape(parse_reference("preset:llama-3.2-1b")).stored(4)
    mixed, pure = (Gguf(pure=pure).stored(plain, DeviceKind.CPU).bytes for pure in (False, True))
    assert pure < mixed < 0.16 * plain.bytes
    assert pure == pytest.approx(plain.bytes * 18 / 128, rel=0.01), "32 numbers in 18 bytes, everywhere"
    with pytest.raises(UnsupportedError, match="Which matrices get more bits in a file of Q5_K_M"):
        Gguf(type="Q5_K_M").stored(plain, DeviceKind.CPU)
    with pytest.raises(UnsupportedError, match="How many bytes IQ4_KT takes"):
        Gguf(type="IQ4_KT", pure=True).stored(plain, DeviceKind.CPU)


# ---- onnxruntime.


@pytest.mark.onnxruntime
@pytest.mark.parametrize(("bits", "inner"), [(4, 96), (4, 100), (8, 100)])
def test_quantized_numbers_take_the_bytes_that_are_predicted_and_are_near(bits: int, inner: int) -> None:
    import numpy as np

    from optigpu.backends.onnxruntime.graphs import quantized

    weight = np.random.default_rng(0).standard_normal((7, inner)).astype(np.float32)
    numbers, scales = quantized(weight, bits, 32)
    assert numbers.nbytes + scales.nbytes == nbits_bytes(7, inner, bits=bits, group=32)
    levels = np.stack((numbers & 15, numbers >> 4), axis=-1).reshape(7, -1) if bits == 4 else numbers
    whole = (levels.reshape(7, -1, 32).astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]
    off = np.abs(whole.reshape(7, -1)[:, :inner] - weight)
    assert off.max() <= np.abs(scales).max() * 1.01


@pytest.mark.parametrize("technique", [OnnxInt8(), OnnxInt4(group_size=128)], ids=str)
def test_the_stored_bytes_follow_from_the_shapes(technique: Any) -> None:
    plain = decoder_shape(parse_reference("preset:gpt2")).stored(4)
    packed = technique.stored(plain, DeviceKind.CPU)
    bits = 8 if isinstance(technique, OnnxInt8) else 4
    for before, after in zip(plain.matrices, packed.matrices, strict=True):
        if after.part in (Part.LINEAR, Part.HEAD):
            expected = nbits_bytes(after.outputs, after.inner, bits=bits, group=technique.group_size)
            assert after.bytes == expected
        else:
            assert after == before


# ---- OpenVINO.


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("openvino"))


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
@pytest.mark.parametrize("name", cases(OPENVINO_FORMS))
def test_logits_are_rounded_alone(tmp_path: Path, name: str) -> None:
    tokens, (technique, bound) = prompts(2, 32), OPENVINO_FORMS[name]
    found = scored(prepared("openvino", tmp_path, technique), tokens)
    assert 0 < error(found, scored(prepared("openvino", tmp_path), tokens)) < bound


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize(("model", "name"), spread([TINY, LLAMA], OPENVINO_FORMS))
def test_the_bytes_of_weights_follow_from_their_shapes(tmp_path: Path, model: str, name: str) -> None:
    technique, _ = OPENVINO_FORMS[name]
    stored = technique.stored(decoder_shape(parse_reference(model)).stored(4), DeviceKind.CPU)
    found = prepared("openvino", tmp_path, technique, model=model).weights().bytes
    assert found == pytest.approx(stored.bytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.openvino
def test_activations_are_rounded_where_the_facts_say_that_products_are_of_int8(tmp_path: Path) -> None:
    tokens = prompts(1, 32)
    narrow, wide = (prepared("openvino", tmp_path, OpenVinoInt8(products=kind)) for kind in ("int8", "float"))
    differs = error(scored(narrow, tokens), scored(wide, tokens)) > 0
    assert differs is has_vnni(), "OpenVINO rounds activations for VNNI alone"
    assert bool(narrow.notes.facts["openvino_dynamic_quantization_group"]) is differs
    assert wide.notes.facts["openvino_dynamic_quantization_group"] == 0
