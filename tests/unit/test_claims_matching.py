"""Each claim finds what was measured of the same thing, precision and techniques, and nothing else."""

from typing import Any

import pytest

from optigpu.claims import Measured, from_leaderboard, measured_for
from optigpu.claims.stacks import (
    CARRIERS,
    PRECISIONS,
    PRECISIONS_BY_PARAMETER,
    UNCLAIMED,
)
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Choice
from optigpu.vocabulary import Layer
from tests.unit.claims_results import BOOK, RTX_3090, RTX_4090, T4, a_result, found_for
from tests.unit.made_results import a_row, metric


def test_a_claim_finds_the_best_figure_of_the_same_thing_on_hardware_of_its_name() -> None:
    assert found_for("t4-gpt2-int8", a_result(100.0), a_result(161.2), a_result(90.0)) == 161.2


@pytest.mark.parametrize(
    "other",
    [
        {"hardware": "1x NVIDIA L4 22 GiB"},
        {"hardware": "Tesla T4 simulator 2 cores"},
        {"stack": ("fp16",)},
        {"stack": ()},
        {"stack": ("int8_weight_only", "nf4")},
        {"model": "preset:gpt2-medium"},
        {"workload": {"kind": "prefill", "batch_size": 1}},
        {"name": "requests_per_s"},
        {"stack": ("int8_weight_only", "autocast")},
        {"stack": ("fp8",)},
        {"valid": False},
        {"value": None},
    ],
    ids=str,
)
def test_a_figure_of_something_else_is_not_taken_for_it(other: dict[str, Any]) -> None:
    assert found_for("t4-gpt2-int8", a_result(**other)) is None


@pytest.mark.parametrize(
    "model", ["preset:gpt2", "hub:openai-community/gpt2", "hub:openai-community/gpt2@607a30d", "gpt2"]
)
def test_a_model_is_the_same_by_any_of_its_names(model: str) -> None:
    assert found_for("t4-gpt2-int8", a_result(5.0, model=model)) == 5.0


@pytest.mark.parametrize("hardware", [T4, "Test CPU 2 cores", "1x NVIDIA H100 80GB HBM3 80 GiB"])
def test_bytes_of_weights_are_found_wherever_they_were_counted(hardware: str) -> None:
    weights: dict[str, Any] = {"name": "weight_bytes", "hardware": hardware, "stack": ("int8_hybrid",)}
    assert found_for("gpu-poor-gpt2-after", a_result(129e6, **weights)) == 129e6
    prefill = {"kind": "prefill", "batch_size": 4}
    assert found_for("gpu-poor-gpt2-after", a_result(129e6, workload=prefill, **weights)) == 129e6
    assert found_for("gpu-poor-medium-after", a_result(129e6, **weights)) is None
    assert found_for("gpu-poor-gpt2-before", a_result(129e6, **weights)) is None


@pytest.mark.parametrize(
    ("text", "model", "found"),
    [
        ("hellaswag", "hub:meta-llama/Llama-3.1-8B", True),
        ("wikitext-2", "hub:meta-llama/Llama-3.1-8B", False),
        (None, "hub:meta-llama/Llama-3.1-8B", False),
        ("hellaswag", "preset:llama-3.1-8b", False),
    ],
)
def test_a_quality_is_the_same_by_its_test_and_of_trained_weights(
    text: str | None, model: str, found: bool
) -> None:
    result = a_result(0.81, name="accuracy", stack=("bf16",), model=model, text=text)
    assert (found_for("3090-llama-bf16-accuracy", result) is not None) is found


@pytest.mark.parametrize(
    ("implementation", "length", "dtype", "heads", "causal", "expected"),
    [
        ("standard", 1024, "float16", 12, False, 0.002),
        ("fused", 1024, "float16", 12, False, None),
        ("standard", 2048, "float16", 12, False, None),
        ("standard", 1024, "float32", 12, False, None),
        ("standard", 1024, "float16", 16, False, None),
        ("standard", 1024, "float16", 12, True, None),
    ],
)
def test_attention_is_the_same_by_implementation_length_dtype_heads_and_mask(
    implementation: str, length: int, dtype: str, heads: int, causal: bool, expected: float | None
) -> None:
    workload = {
        "kind": "attention", "lengths": [length], "implementations": [implementation], "batch_size": 4,
        "heads": heads, "head_size": 64, "causal": causal, "dtype": dtype,
    }  # fmt: skip
    found = a_result(0.002, name="latency_s", hardware=RTX_4090, stack=(), workload=workload, model=None)
    assert found_for("4090-attention-1024", found) == expected


def an_attention(implementation: str, value: float, metric_name: str = "latency_s") -> dict[str, Any]:
    """A result of attention over 512 tokens that see each other all."""
    workload = {
        "kind": "attention", "lengths": [512], "implementations": [implementation], "causal": False, "dtype": "float16",
    }  # fmt: skip
    return a_result(value, name=metric_name, hardware=RTX_4090, stack=(), workload=workload, model=None)


def test_a_printed_ratio_is_found_as_that_of_its_two_sides() -> None:
    standard, fused = an_attention("standard", 9e-4), an_attention("fused", 3e-4)
    assert found_for("4090-flash-512-ratio", standard, fused) == pytest.approx(3.0)
    assert found_for("4090-flash-512-ratio", standard) is None
    assert found_for("4090-flash-512-ratio", standard, an_attention("fused", 0.0)) is None
    fused["environment"]["hardware_class"] = "1x NVIDIA L4 22 GiB"
    assert found_for("4090-flash-512-ratio", standard, fused) is None


def test_a_row_of_the_leaderboard_is_as_good_as_a_result() -> None:
    found = measured_for(BOOK.claim("t4-gpt2-int8"), from_leaderboard([a_row()]), BOOK)
    assert isinstance(found, Measured)
    assert (found.value, found.ci, found.label) == (222.0, (220.0, 224.0), "int8_weight_only")
    empty = a_row(value=metric("tokens_per_s", None, reason="x"))
    assert measured_for(BOOK.claim("t4-gpt2-int8"), from_leaderboard([empty]), BOOK) is None


RESNET: dict[str, Any] = {
    "workload": {"kind": "train_step", "batch_size": 32, "image_size": None, "optimizer": "sgd"},
    "model": "preset:resnet-50",
    "hardware": RTX_4090,
    "name": "images_per_s",
}
HALF = {"name": "mixed_precision", "dtype": "float16"}


def test_training_finds_the_figure_of_the_same_precision_and_batch() -> None:
    assert found_for("4090-train-fp32", a_result(320.0, stack=(), **RESNET)) == 320.0
    assert found_for("4090-train-fp16", a_result(700.0, stack=(HALF,), **RESNET)) == 700.0
    assert found_for("4090-train-bf16", a_result(700.0, stack=(HALF,), **RESNET)) is None
    assert found_for("4090-train-fp32", a_result(700.0, stack=(HALF,), **RESNET)) is None
    smaller = RESNET | {"workload": RESNET["workload"] | {"batch_size": 16}}
    assert found_for("4090-train-fp32", a_result(320.0, stack=(), **smaller)) is None
    inference = RESNET | {"workload": {"kind": "classify", "batch_size": 32}}
    assert found_for("4090-train-fp32", a_result(320.0, stack=(), **inference)) is None


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
