"""A claim finds figures of the same precision and the same techniques."""

from typing import Any

import pytest

from optigpu.claims.stacks import (
    CARRIERS,
    PRECISIONS,
    PRECISIONS_BY_PARAMETER,
    UNCLAIMED,
)
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Choice
from optigpu.vocabulary import Layer
from tests.unit.claims_results import RTX_3090, a_result, found_for


def test_quantized_weights_may_be_computed_in_16_bits() -> None:
    assert found_for("t4-gpt2-int8", a_result(5.0, stack=("fp16", "int8_weight_only"))) == 5.0
    assert found_for("t4-gpt2-fp16", a_result(5.0, stack=("fp16", "int8_weight_only"))) is None


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


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_that_sets_the_precision_has_one_for_claims(name: str) -> None:
    """A new one would else be taken for a change beside the precision."""
    known = CARRIERS.keys() | PRECISIONS.keys() | PRECISIONS_BY_PARAMETER.keys() | UNCLAIMED
    choices = {Choice.PRECISION, Choice.WEIGHTS} & set(TECHNIQUES[name].choices)
    quantizes = TECHNIQUES[name].layer is Layer.QUANTIZATION
    assert (name in known) is bool(choices or quantizes)


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
