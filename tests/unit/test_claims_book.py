"""The book of published figures: what it holds, where it is from, how it is read and printed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from optigpu.claims import Status, baselines, read_book
from optigpu.claims.findings import percent, plain, printed, rounded
from optigpu.vocabulary import METRICS, SpecError

BOOK = baselines()


def test_the_baselines_hold_the_founding_figures_as_claims() -> None:
    figures = {claim.id: claim.value for claim in BOOK.claims}
    assert len(figures) >= 200
    founding = {claim.status for claim in BOOK.claims if claim.source.startswith("project's founding notes")}
    assert founding == {Status.CLAIMED}
    figure = {
        "5090-matmul-fp32": 40, "5090-gpt2": 120, "5090-power": 575, "t4-gpt2-int4": 210,
        "4090-attention-8192": 144.2, "3090-checkpointing-step": 378, "3090-llama-gptq-perplexity": 6.39,
        "cpu-llama-q4": 18, "mistral-all": 16.1, "gpu-poor-large-before": 2953, "gpu-poor-large-speed-results": 0.95,
        "layers-int4-accuracy": 98, "layers-kv-cache": 60, "esp32-mobilenet-latency": 20, "esp32-efficiency-ratio": 455,
        "esp32-price": 700, "5090-price": 250_000, "4090-train-fp32-memory": 6200, "4090-train-bf16-memory": 3100,
        "4090-train-fp32-step": 95, "4090-train-fp16-step": 41, "4090-train-bf16-step": 38,
        "4090-flash-512-ratio": 2.65, "4090-flash-8192-ratio": 32.92, "4090-flash-8192-memory-ratio": 64,
        "flash-2-flops": 72,
        "3090-llama-bf16-accuracy": 82.1, "3090-llama-nf4-accuracy": 81.2, "cpu-llama-q4-accuracy": 81.3,
        "mistral-fp16-utilization": 68, "mistral-int8-utilization": 75, "mistral-nf4-utilization": 88,
        "mistral-fused-utilization": 91, "mistral-all-utilization": 90, "mistral-int8-loss": 0.02,
        "mistral-nf4-loss": 0.08, "mistral-fusion": 1.3, "mistral-verify": 1.2, "mistral-profiling": 1.56,
        "lesson-pytorch": 500, "lesson-tensorrt-fp16": 60, "lesson-factors": 8, "gpu-poor-llama-needs": 28,
        "4090-train-fp32": 336, "4090-train-fp16": 780, "4090-train-bf16": 842, "3090-plain-memory": 18.4,
        "3090-checkpointing-memory": 7.8, "3090-plain-step": 285, "mistral-batch-scaling": 2.1,
        "impact-checkpointing": 0.7, "impact-int8-loss": 0.5,
    }  # fmt: skip
    assert {name: figures[name] for name in figure} == figure
    ranges = {claim.id: (claim.value, claim.to, claim.unit) for claim in BOOK.claims if claim.to}
    assert ranges == {
        "layers-no-grad": (40, 50, "%"), "layers-autocast": (30, 40, "%"), "layers-compile": (1.3, 1.8, "x"),
        "layers-compile-first-call": (30, 60, "s"), "gpu-poor-size-small": (0.5, 0.8, "x"),
        "alternatives-gpu-poor-speed": (0.9, 1.0, "x"), "alternatives-llama-cpp-speed": (2, 3, "x"),
        "impact-bf16": (2, 3, "x"), "impact-flash-memory": (50, 90, "%"), "impact-flash": (2, 8, "x"),
        "impact-compile": (1.5, 2.5, "x"), "impact-kv-cache": (10, 50, "x"),
        "impact-checkpointing-memory": (50, 70, "%"),
        "impact-int8": (0.9, 1.1, "x"), "impact-int4": (1.3, 1.8, "x"), "impact-int4-loss": (0.5, 1.5, "% lost"),
        "impact-distillation-memory": (70, 90, "%"), "impact-distillation": (5, 20, "x"),
        "impact-distillation-loss": (5, 15, "% lost"), "impact-pruning-memory": (30, 70, "%"),
        "impact-pruning": (2, 5, "x"), "impact-pruning-loss": (2, 10, "% lost"),
    }  # fmt: skip


def test_the_figures_of_others_are_measured_and_name_their_page() -> None:
    others = {claim.id: claim for claim in BOOK.claims if claim.status is Status.MEASURED_BY_OTHERS}
    assert all(re.search(r"github\.com/|arXiv:", claim.source) for claim in others.values())
    figures = {
        "esp-dl-mobilenet-one-core": 1309.5, "esp-dl-mobilenet-two-cores": 867, "esp-nn-person-before": 2300,
        "esp-nn-person-after": 54, "esp-nn-mobilenet-before": 26000, "esp-nn-mobilenet-after": 1434,
        "torchtune-baseline": 2091, "torchtune-qlora-memory": 4.6, "torchtune-adamw": 6960,
        "torchtune-adamw-memory": 17.6,
        "torchtitan-8-fsdp": 5762, "torchtitan-8-compiled": 6667, "torchtitan-8-float8": 8532, "gpt-fast-8b": 93.89,
        "h100-decode-bandwidth": 27, "h100-decode-graphs": 1.259, "h100-megakernel-bandwidth": 78,
        "torchao-8b": 126.90, "torchao-8b-int8": 198.85, "torchao-8b-int4": 241.39,
    }  # fmt: skip
    assert {name: others[name].value for name in figures} == figures


def test_what_libraries_of_kernels_say_of_themselves_are_claims() -> None:
    figures = {"liger-throughput": 20, "liger-memory": 60, "unsloth-speed": 2, "unsloth-memory": 70}
    found = {name: BOOK.claim(name) for name in figures}
    assert {name: claim.value for name, claim in found.items()} == figures
    assert {claim.status for claim in found.values()} == {Status.CLAIMED}


def test_no_source_names_a_path_of_a_machine() -> None:
    assert [claim.id for claim in BOOK.claims if claim.source.startswith("/") or ".txt" in claim.source] == []


def test_a_claim_in_a_metric_that_is_measured_here_is_in_a_unit_of_it() -> None:
    for claim in BOOK.claims:
        unit = METRICS[claim.metric].unit if claim.metric in METRICS else None
        if unit is not None:
            assert claim.unit in {"s": ("ms", "s"), "B": ("MB", "GB", "GiB"), "1/s": ("tok/s", "img/s", "FPS"),
                                  "TFLOP/s": ("TFLOPS",), "W": ("W",), "1": ("1", "%"),
                                  "%": ("% lost",)}[unit], claim.id  # fmt: skip


TOML = """
[thesis]
sentence = "s"
source = "s"
smaller = "NVIDIA T4"
larger = "NVIDIA H200"
[[model]]
name = "mobilenet_v2"
macs = 300e6
source = "s"
[[text]]
name = "t"
source = "s"
status = "measured by others"
defaults = {{ workload = "generate", metric = "tokens_per_s", unit = "tok/s", what = "w", value = 1 }}
claim = [{claims}]
"""


def test_a_claim_takes_from_its_text_what_it_does_not_say() -> None:
    book = read_book(TOML.format(claims='{ id = "a", unit = "x", metric = "speedup" }'))
    (claim,) = book.claims
    assert (claim.unit, claim.value, claim.text, claim.status) == ("x", 1, "t", Status.MEASURED_BY_OTHERS)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ('{ id = "a" }, { id = "a" }', "same id"),
        ('{ id = "a", series = ["b"] }', "refers to unknown claims: b"),
        ('{ id = "a", unit = "furlongs" }', "unknown unit 'furlongs'"),
        ('{ id = "a", model = "gpt5" }', "unknown model 'gpt5'"),
        ('{ id = "a", metric = "beauty" }', "unknown metric 'beauty'"),
        ('{ id = "a", to = 1 }', "the range from 1 to 1 is empty"),
        ('{ id = "a", product_of = ["b"] }', "refers to unknown claims: b"),
        ('{ id = "a", saving_of = ["a", "b"] }', "refers to unknown claims: b"),
        ('{ id = "a", value = 0 }', "greater than 0"),
        ('{ id = "a", colour = "red" }', "Extra inputs"),
    ],
)
def test_baselines_that_do_not_fit_together_are_refused(claims: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        read_book(TOML.format(claims=claims))


def test_an_unknown_claim_is_named() -> None:
    with pytest.raises(SpecError, match="no claim 'nobody'"):
        BOOK.claim("nobody")


@pytest.mark.parametrize(
    ("value", "unit", "low", "high"),
    [(2.2, "x", 2.15, 2.25), (16.0, "GB", 15.5e9, 16.5e9), (45.23, "ms", 0.045225, 0.045235)],
)
def test_rounding_is_half_of_the_last_printed_digit(value: float, unit: str, low: float, high: float) -> None:
    claim = BOOK.claims[0].model_copy(update={"value": value, "unit": unit})
    assert rounded(claim) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0999, "10%"),
        (0.0951, "10%"),
        (0.094, "9%"),
        (0.0036, "0.4%"),
        (1e-7, "0.00001%"),
        (2.4, "240%"),
        (1, "100%"),
    ],
)
def test_a_share_in_percent_has_no_exponent(share: float, text: str) -> None:
    assert percent(share) == text


@given(st.floats(min_value=1e-12, max_value=1e12), st.integers(min_value=1, max_value=6))
def test_a_plain_number_is_the_number_rounded_without_an_exponent(number: float, digits: int) -> None:
    text = plain(number, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(number, rel=0.51 * 10.0 ** (1 - digits))


@pytest.mark.parametrize(
    ("claim_id", "text"),
    [
        ("t4-gpt2-int8", "148 tok/s"),
        ("layers-int4-accuracy", "at least 98%"),
        ("layers-compile", "1.3 to 1.8x"),
        ("mistral-int8-loss", "0.02% lost"),
        ("5090-price", "250,000 INR"),
    ],
)
def test_a_figure_is_printed_with_its_range_its_limit_and_its_unit(claim_id: str, text: str) -> None:
    assert printed(BOOK.claim(claim_id)) == text
