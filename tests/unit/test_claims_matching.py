"""Each claim finds what was measured of the same thing, and nothing else."""

from typing import Any

import pytest

from optigpu.claims import Measured, from_leaderboard, from_results, measured_for, says_too_little, why_never
from tests.unit.claims_results import BOOK, RTX_3090, RTX_4090, T4, a_result, found_for
from tests.unit.made_results import a_row, metric


def test_a_claim_finds_the_best_figure_of_the_same_thing_on_hardware_of_its_name() -> None:
    assert found_for("t4-gpt2-int8", a_result(100.0), a_result(161.2), a_result(90.0)) == 161.2


def test_without_results_nothing_was_measured() -> None:
    assert found_for("t4-gpt2-int8") is None


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


def test_bytes_of_a_gpu_are_found_on_another_one_for_the_same_workload_alone() -> None:
    h100, claim = "1x NVIDIA H100 80GB HBM3 80 GiB", "3090-llama-nf4-memory"
    memory: dict[str, Any] = {"name": "peak_bytes", "stack": ("nf4",), "model": "preset:llama-3.1-8b"}
    assert found_for(claim, a_result(6e9, hardware=h100, **memory)) == 6e9
    prefill = {"kind": "prefill", "batch_size": 1}
    assert found_for(claim, a_result(6e9, hardware=h100, workload=prefill, **memory)) is None
    there = a_result(7e9, hardware=RTX_3090, **memory)
    assert found_for(claim, a_result(6e9, hardware=h100, **memory), there) == 7e9


def test_a_claim_without_hardware_finds_no_speed() -> None:
    llama: dict[str, Any] = {
        "stack": ({"name": "gguf", "type": "Q4_K_M"},),
        "model": "hub:meta-llama/Llama-3.1-8B",
    }
    cpu: dict[str, Any] = {"hardware": "AMD EPYC 9654 96 cores", "backend": "llama_cpp"}
    assert found_for("cpu-llama-q4", a_result(18.0, **llama, **cpu)) is None


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


def test_a_quality_without_its_test_is_found_nowhere() -> None:
    measured = a_result(6.1, name="perplexity", stack=("bf16",), text="wikitext-2", hardware=RTX_3090)
    measured["variant"]["model"] = "hub:meta-llama/Llama-3.1-8B"
    assert found_for("3090-llama-bf16-perplexity", measured) is None


@pytest.mark.parametrize(("positions", "found"), [([2048], True), ([4096], False)])
def test_a_step_is_the_same_by_its_position(positions: list[int], found: bool) -> None:
    workload = {"kind": "kv_cache", "positions": positions, "batch_size": 1}
    result = a_result(
        0.06, name="tpot_s", hardware="1x NVIDIA L4 22 GiB", stack=("bf16",), workload=workload,
        model="hub:Qwen/Qwen2.5-7B",
    )  # fmt: skip
    assert (found_for("l4-decode", result) is not None) is found


@pytest.mark.parametrize(("prompt_tokens", "found"), [(5, True), (128, False)])
def test_a_generation_is_the_same_by_the_length_of_its_prompt(prompt_tokens: int, found: bool) -> None:
    workload = {"kind": "generate", "prompt_tokens": prompt_tokens, "new_tokens": 64, "batch_size": 1}
    stack = ("bf16", "static_kv_cache", "torch_compile")
    a100 = "1x NVIDIA A100-SXM4-80GB 80 GiB"
    result = a_result(90.0, hardware=a100, stack=stack, workload=workload, model="preset:llama-3.1-8b")
    assert (found_for("gpt-fast-8b", result) is not None) is found


def test_a_figure_that_is_restricted_to_something_else_is_not_found() -> None:
    claim = BOOK.claim("t4-gpt2-int8").model_copy(update={"scope": "one core"})
    assert measured_for(claim, from_results([a_result()]), BOOK) is None
    assert why_never(claim) == "No result is restricted to one core."


@pytest.mark.parametrize(
    ("size", "dtype", "expected"), [(4096, "float16", 50.0), (2048, "float16", None), (4096, "float32", None)]
)
def test_a_matmul_is_the_same_by_size_and_dtype(size: int, dtype: str, expected: float | None) -> None:
    workload = {"kind": "matmul", "sizes": [size], "dtypes": [dtype]}
    result = a_result(50.0, name="tflops", stack=(), model=None, workload=workload)
    assert found_for("t4-matmul-fp16", result) == expected


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


def test_a_saving_of_bytes_is_found_wherever_they_were_counted() -> None:
    before = a_result(498e6, name="weight_bytes", stack=(), hardware=T4)
    after = a_result(129e6, name="weight_bytes", stack=("int8_hybrid",), hardware="2x Test CPU")
    assert found_for("gpu-poor-gpt2-saved", before, after) == pytest.approx(1 - 129 / 498)
    assert found_for("gpu-poor-medium-saved", before, after) is None


def test_fused_attention_is_found_for_a_claim_of_it() -> None:
    workload = {"kind": "attention", "lengths": [512], "implementations": ["fused"], "dtype": "float16"}
    found = a_result(3e-4, name="latency_s", hardware=RTX_4090, stack=(), workload=workload, model=None)
    assert found_for("4090-flash-512", found) == 3e-4
    assert found_for("4090-attention-512", found) is None


@pytest.mark.parametrize("model", ["preset:resnet-50", "hub:microsoft/resnet-50"])
def test_an_image_model_is_the_same_by_any_of_its_names(model: str) -> None:
    workload = {"kind": "classify", "batch_size": 32, "image_size": None}
    found = a_result(0.012, name="latency_s", hardware=RTX_4090, stack=(), workload=workload, model=model)
    assert found_for("4090-resnet-eager", found) == 0.012
    found["variant"]["workload"] = workload | {"image_size": 64}
    assert found_for("4090-resnet-eager", found) is None


def test_the_lowest_is_the_best_of_what_should_be_low() -> None:
    hardware, workload = "1x NVIDIA GeForce RTX 3090 24 GiB", {"kind": "generate", "batch_size": 1}
    results = [
        a_result(
            value,
            name="peak_bytes",
            hardware=hardware,
            stack=("awq",),
            model="preset:llama-3.1-8b",
            workload=workload,
        )
        for value in (6.5e9, 5.9e9)
    ]
    assert found_for("3090-llama-awq-memory", *results) == 5.9e9
    results[1]["variant"]["workload"] = workload | {"batch_size": 8}
    assert found_for("3090-llama-awq-memory", *results) == 6.5e9


def test_a_row_of_the_leaderboard_is_as_good_as_a_result() -> None:
    found = measured_for(BOOK.claim("t4-gpt2-int8"), from_leaderboard([a_row()]), BOOK)
    assert isinstance(found, Measured)
    assert (found.value, found.ci, found.label) == (222.0, (220.0, 224.0), "int8_weight_only")
    empty = a_row(value=metric("tokens_per_s", None, reason="x"))
    assert measured_for(BOOK.claim("t4-gpt2-int8"), from_leaderboard([empty]), BOOK) is None


@pytest.mark.parametrize(
    ("changes", "little"),
    [
        ({}, False),
        ({"techniques": ("int8_hybrid", "torch_compile")}, True),
        ({"techniques": ("native_decode",)}, True),
        ({"metric": "accuracy", "value": metric("accuracy", 0.8)}, True),
    ],
)
def test_a_row_that_leaves_out_the_bits_or_the_text_is_not_taken_for_a_figure(
    changes: dict[str, Any], little: bool
) -> None:
    row = a_row(**changes)
    assert says_too_little(row) is little
    assert (from_leaderboard([row]) == []) is little


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


def test_weights_in_half_precision_are_not_mixed_precision() -> None:
    assert found_for("4090-train-fp16", a_result(700.0, stack=("fp16",), **RESNET)) is None


def test_a_ladder_of_training_is_told_apart_by_its_rungs_and_its_length() -> None:
    claim = BOOK.claim("torchtune-packed-memory").model_copy(update={"model": None})
    workload = {"kind": "train_step", "batch_size": 2, "sequence_tokens": 4096}
    packed = ("bf16", "sequence_packing")

    def found(stack: tuple[str, ...], **changes: Any) -> float | None:
        result = a_result(60e9, name="peak_bytes", stack=stack, workload=workload | changes)
        return figure.value if (figure := measured_for(claim, from_results([result]), BOOK)) else None

    assert found(packed) == 60e9
    assert found((*packed, "compile_training")) is None
    assert found(("bf16",)) is None
    assert found(packed, sequence_tokens=2048) is None


def test_training_has_no_reason_of_its_own_against_a_measurement() -> None:
    assert why_never(BOOK.claim("4090-train-fp32")) is None
    assert why_never(BOOK.claim("torchtune-baseline-memory")) is None
    assert why_never(BOOK.claim("3090-plain-step")) == (
        "No result is restricted to the text's own transformer of 12 layers."
    )
    assert why_never(BOOK.claim("liger-throughput")) == (
        "A result has no such metric: share of the throughput that is gained."
    )
    assert why_never(BOOK.claim("torchtitan-8-fsdp-memory")) == "OptiGPU has no technique fsdp."
