"""A claim finds figures of the same precision and the same techniques."""

from typing import Any, get_args

import pytest

from optigpu.claims.stacks import (
    CARRIERS,
    PRECISIONS,
    PRECISIONS_BY_PARAMETER,
    UNCLAIMED,
    brought_along,
    has_precision,
    same_stack,
)
from optigpu.claims.terms import Precision
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Choice
from optigpu.vocabulary import Layer
from tests.unit.claims_results import BOOK, RTX_3090, a_result, found_for


def test_quantized_weights_may_be_computed_in_16_bits() -> None:
    assert found_for("t4-gpt2-int8", a_result(5.0, stack=("fp16", "int8_weight_only"))) == 5.0
    assert found_for("t4-gpt2-fp16", a_result(5.0, stack=("fp16", "int8_weight_only"))) is None


def test_a_naive_claim_takes_no_optimized_figure() -> None:
    hardware = "1x NVIDIA GeForce RTX 5090 32 GiB"
    assert found_for("5090-gpt2", a_result(5.0, hardware=hardware, stack=("torch_compile",))) is None
    assert found_for("5090-gpt2", a_result(4.0, hardware=hardware, stack=())) == 4.0
    other_engine = a_result(4.0, hardware=hardware, stack=(), backend="llama_cpp")
    assert found_for("5090-gpt2", other_engine) is None


@pytest.mark.parametrize(
    ("stack", "found"),
    [
        (("fused_attention", "static_kv_cache", "torch_compile", "bf16"), True),
        (("fused_attention", "torch_compile", "bf16"), True),
        (("fused_attention", "static_kv_cache", "bf16"), False),
        (("static_kv_cache", "torch_compile", "bf16"), False),
        (("fused_attention", "int8_kv_cache", "torch_compile", "bf16"), False),
        (("fused_attention", "static_kv_cache", "torch_compile", "fp16"), False),
    ],
)
def test_a_claim_of_a_technique_takes_a_stack_with_what_the_technique_brings_along(
    stack: tuple[str, ...], found: bool
) -> None:
    result = a_result(70.0, hardware=RTX_3090, stack=stack, model="preset:llama-3.1-8b")
    assert (found_for("3090-llama-compiled", result) is not None) is found


def test_what_a_technique_brings_along_is_no_claim_s_by_itself() -> None:
    alone = a_result(70.0, hardware=RTX_3090, stack=("static_kv_cache", "bf16"), model="preset:llama-3.1-8b")
    assert found_for("3090-llama-bf16", alone) is None


def test_what_techniques_bring_along_is_what_they_require() -> None:
    assert brought_along(["torch_compile", "fused_attention", "unknown"]) == {"static_kv_cache"}
    assert brought_along(["fused_attention"]) == set()


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_that_sets_the_precision_has_one_for_claims(name: str) -> None:
    """A new one would else be taken for a change beside the precision."""
    known = CARRIERS.keys() | PRECISIONS.keys() | PRECISIONS_BY_PARAMETER.keys() | UNCLAIMED
    choices = {Choice.PRECISION, Choice.WEIGHTS} & set(TECHNIQUES[name].choices)
    quantizes = TECHNIQUES[name].layer is Layer.QUANTIZATION
    assert (name in known) is bool(choices or quantizes)


@pytest.mark.parametrize("name", PRECISIONS_BY_PARAMETER)
def test_every_value_of_a_parameter_that_sets_the_bits_has_a_precision(name: str) -> None:
    parameter, precisions = PRECISIONS_BY_PARAMETER[name]
    assert set(get_args(TECHNIQUES[name].model_fields[parameter].annotation)) == set(precisions)


INT4: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8_hybrid": ({"bits": 4}, {"bits": 8}),
    "native_decode": ({"weights": "w4"}, {"weights": "w8"}),
    "gguf": ({"type": "Q4_0"}, {"type": "Q8_0"}),
}


@pytest.mark.parametrize("name", INT4)
def test_the_bits_of_a_technique_are_those_of_its_parameter(name: str) -> None:
    four, eight = ({"name": name} | parameters for parameters in INT4[name])
    assert found_for("t4-gpt2-int4", a_result(5.0, stack=(four,))) == 5.0
    assert found_for("t4-gpt2-int8", a_result(5.0, stack=(four,))) is None
    assert found_for("t4-gpt2-int8", a_result(6.0, stack=(eight,))) == 6.0
    assert found_for("t4-gpt2-int4", a_result(6.0, stack=(eight,))) is None


def test_a_parameter_that_is_left_out_has_its_default() -> None:
    assert found_for("t4-gpt2-int8", a_result(5.0, stack=("int8_hybrid",))) == 5.0
    assert found_for("t4-gpt2-int4", a_result(5.0, stack=("native_decode",))) == 5.0


def test_sixteen_bits_may_come_from_the_weights_themselves() -> None:
    assert found_for("t4-gpt2-fp16", a_result(5.0, stack=({"name": "gguf", "type": "F16"},))) == 5.0
    native = {"name": "native_decode", "weights": "bf16"}
    assert found_for("t4-gpt2-fp16", a_result(5.0, stack=("fp16", native))) is None
    assert has_precision("bf16", (native,))
    assert not has_precision("bf16", ({"name": "bf16"}, {"name": "native_decode", "weights": "w8"}))


@pytest.mark.parametrize(
    "technique", [{"name": "gguf", "type": "Q3_K_M"}, {"name": "native_decode", "weights": "w3k"}]
)
@pytest.mark.parametrize("beside", [(), ({"name": "bf16"},)])
def test_three_bits_are_no_precision_that_a_claim_is_about(
    technique: dict[str, Any], beside: tuple[dict[str, Any], ...]
) -> None:
    assert not any(has_precision(each, (*beside, technique)) for each in get_args(Precision))


def test_an_operator_that_does_more_than_quantize_is_no_plain_quantization() -> None:
    operator = {"name": "native_decode", "weights": "w8"}
    plain = BOOK.claim("mistral-int8")
    assert same_stack(plain, ({"name": "int8_weight_only"},))
    assert not same_stack(plain, (operator,))
