"""A decoder's program is filled from every family it is for, and from no other model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from optigpu.ops.decode.program import WeightKind
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import UnsupportedError
from tests.engine.decode_reference import ReferenceDecoder
from tests.engine.decoder_models import (
    DECODERS,
    configured,
    decoder_model,
    decoder_of,
    packed,
    twin,
)
from tests.engine.tiny_models import FAMILIES, prompt, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LENGTH = 14


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "w4") for name in DECODERS), ("gpt2", "w8"), ("gpt2", "bf16")]
)
def test_a_program_computes_what_the_model_of_the_packed_weights_computes(
    name: str, kind: WeightKind
) -> None:
    model, _ = packed(decoder_model(name), NativeDecode(calibration="none", weights=kind))
    expected = twin(decoder_model(name), model)(input_ids=prompt(2, LENGTH), use_cache=False).logits
    reference = ReferenceDecoder(attached(model), exact=True)
    reference.begin(2, LENGTH)
    found = torch.stack([reference.extend(token) for token in prompt(2, LENGTH).split(1, dim=1)], dim=1)
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("name", DECODERS)
def test_the_model_itself_computes_with_the_packed_weights(name: str) -> None:
    model, _ = packed(decoder_model(name))
    expected = twin(decoder_model(name), model)(input_ids=prompt(), use_cache=False).logits
    found = model(input_ids=prompt(), use_cache=False).logits
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("name", DECODERS)
def test_the_operator_computes_what_the_reference_computes(name: str) -> None:
    """With bfloat16 weights: an activation that is rounded to int8 the other way would change all that follow."""
    model, _ = packed(decoder_model(name), NativeDecode(calibration="none", weights="bf16"))
    tokens = prompt(2, LENGTH)
    reference, operator = ReferenceDecoder(attached(model)), decoder_of(model)
    for decoder in (reference, operator):
        decoder.begin(2, LENGTH)
    for part in tokens.split([LENGTH - 2, 1, 1], dim=1):
        expected, found = reference.extend(part), operator.extend(part)
        assert float((found - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


def test_angles_go_as_far_as_they_are_asked_for() -> None:
    model, _ = packed(decoder_model("llama-yarn"))
    rotary = attached(model).rotary
    assert rotary is not None
    short, long = rotary(3), rotary(200)
    for one, other in zip(short, long, strict=True):
        assert (one.shape, other.shape) == ((3, 8), (200, 8))
        assert one.equal(other[:3])
    assert float(long[0].max()) > 1.1  # yarn makes them longer


def damaged(model: Any, path: str) -> Any:
    model.get_submodule(path).weight.data[1, 3] = torch.nan
    return model


def with_modules(model: Any, technique: Technique) -> Any:
    technique.modules(model, Notes())
    return model


def classifier() -> Any:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PARTIAL = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "other family": (lambda: family_of_phi3(), "supports GPT2LMHeadModel, .*, not Phi3ForCausalLM"),
    "no causal language model": (classifier, "not GPT2ForSequenceClassification"),
    "norms after": (
        lambda: configured("opt", do_layer_norm_before=False),
        "does not support do_layer_norm_before = False",
    ),
    "projections": (
        lambda: configured("opt", word_embed_proj_dim=32),
        "word_embed_proj_dim = 32, only hidden_size",
    ),
    "cross-attention": (lambda: configured("gpt2", add_cross_attention=True), "add_cross_attention = True"),
    "angles by length": (
        lambda: configured("llama", rope_parameters=DYNAMIC),
        "rope_parameters.rope_type = 'dynamic', only 'default' or 'linear'",
    ),
    "part of a head": (
        lambda: configured("llama", rope_parameters=PARTIAL),
        "rope_parameters.partial_rotary_factor = 0.5, only 1.0",
    ),
    "activation": (
        lambda: configured("llama", hidden_act="quick_gelu"),
        "hidden_act = 'quick_gelu', only 'gelu_new'",
    ),
    "norms without weights": (
        lambda: configured("opt", layer_norm_elementwise_affine=False),
        "layer_norm_elementwise_affine = False",
    ),
    "no final norm": (
        lambda: configured("opt", _remove_final_layer_norm=True),
        "_remove_final_layer_norm = True",
    ),
    "odd heads": (
        lambda: configured("gpt2", n_embd=96, n_head=32),
        "head size that is a multiple of 4 and at most 512; this model has 3",
    ),
    "narrow rows": (
        lambda: configured("gpt2", n_embd=72, n_head=9),
        "hidden size that is a multiple of 16; this model has 72",
    ),
    "wide heads": (
        lambda: configured("llama", head_dim=544),
        "at most 512; this model has 544",
    ),
    "group": (
        lambda: configured("llama", intermediate_size=40),
        "inputs are a multiple of 32; .*down_proj has 40",
    ),
    "damaged linear": (
        lambda: damaged(tiny_model("gpt2"), "transformer.h.1.mlp.c_fc"),
        "c_fc.weight has some that are NaN or infinite",
    ),
    "damaged table": (
        lambda: damaged(tiny_model("gpt2"), "transformer.wpe"),
        "wpe.weight has some that are NaN or infinite",
    ),
    "quantized": (
        lambda: with_modules(tiny_model("gpt2"), Int8WeightOnly()),
        "quantized already .Int8Linear",
    ),
    "packed": (lambda: packed(tiny_model("llama"))[0], "quantized already .DecodeLinear"),
    "changed blocks": (
        lambda: with_modules(tiny_model("llama"), FusedQkv()),
        "needs the blocks of transformers' LlamaForCausalLM, and .* differs",
    ),
}


def family_of_phi3() -> Any:
    from transformers import AutoModelForCausalLM, Phi3Config

    shapes = FAMILIES["llama"] | {"vocab_size": 96, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(Phi3Config(**shapes))


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_run_is_refused_and_left_as_it_was(case: str) -> None:
    make, words = REFUSED[case]
    model = make()
    before = [(type(module), id(module)) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=rf"^native_decode.*{words}.*[^.]\.$"):
        NativeDecode(calibration="none").modules(model, Notes())
    assert [(type(module), id(module)) for module in model.modules()] == before
