"""What the techniques of onnxruntime ask of the engine, and the bytes that they predict."""

from typing import Any

import pytest

from optigpu.backends.onnxruntime.formats import Format, format_of, graph_level_of
from optigpu.models.described import decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.models.tensors import Part
from optigpu.ops.layouts import nbits_bytes
from optigpu.techniques.base import Technique, engine_options
from optigpu.techniques.compilation.onnx_graph import OnnxGraph
from optigpu.techniques.quantization.onnx_int4 import OnnxInt4
from optigpu.techniques.quantization.onnx_int8 import OnnxInt8
from optigpu.techniques.quantization.onnx_static_int8 import OnnxStaticInt8
from optigpu.vocabulary import DeviceKind
from tests.engine.tiny_models import assert_needs_hook


@pytest.mark.parametrize(
    ("technique", "form"),
    [
        (OnnxInt8(), Format(8, 32, 4)),
        (OnnxInt8(group_size=64), Format(8, 64, 4)),
        (OnnxInt4(), Format(4, 32, 4)),
        (OnnxInt4(group_size=128, products="float"), Format(4, 128, 1)),
    ],
    ids=str,
)
def test_matrices_have_the_format_that_is_asked_for(technique: Technique, form: Format) -> None:
    def claim() -> None:
        assert format_of((technique,)) == form

    assert Format.parse(form.name) == form
    assert_needs_hook(technique, "engine", claim)


@pytest.mark.parametrize("level", ["disabled", "basic", "extended"])
def test_the_graph_is_rewritten_as_far_as_is_asked_for(level: Any) -> None:
    technique = OnnxGraph(level=level)

    def claim() -> None:
        assert graph_level_of((technique,)) == level

    assert_needs_hook(technique, "engine", claim)


def test_without_techniques_weights_are_float32_and_the_graph_is_rewritten_wholly() -> None:
    assert format_of(()) == Format(32)
    assert format_of(()).is_float
    assert graph_level_of(()) == "all"


@pytest.mark.onnxruntime
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inner", [96, 100])
def test_quantized_numbers_take_the_bytes_that_are_predicted_and_are_near(bits: int, inner: int) -> None:
    import numpy as np

    from optigpu.backends.onnxruntime.decoder_graph import quantized

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


def test_a_classifier_s_scales_come_from_as_many_images_as_is_asked_for() -> None:
    technique = OnnxStaticInt8(images=3)

    def claim() -> None:
        options = engine_options((technique,))
        assert (options.weights, options.products, options.calibrated_on) == ("int8", "int8", 3)

    assert_needs_hook(technique, "engine", claim)
