"""Published figures: their book, what rules find by arithmetic, and which measurements stand beside a claim."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from optigpu.claims.matching import CARRIERS, PRECISIONS, PRECISIONS_BY_PARAMETER, UNCLAIMED
from optigpu.claims.model import Book, Claim, Plausibility, RuleFinding, baselines, read_book, rounded
from optigpu.claims.rules import judge
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Choice
from optigpu.vocabulary import Layer
from tests.unit.claims_results import RTX_3090, RTX_4090, T4, a_result, found_for

BOOK = baselines()
BROKEN = (Plausibility.IMPLAUSIBLE, Plausibility.DOUBTFUL)


def changed(claim_id: str, **changes: Any) -> Book:
    """The book with one claim that says something else."""
    claims = (claim.model_copy(update=changes) if claim.id == claim_id else claim for claim in BOOK.claims)
    return BOOK.model_copy(update={"claims": tuple(claims)})


def finding(claim_id: str, rule: str, book: Book = BOOK) -> RuleFinding:
    """What a rule says of a claim, which it must say something of."""
    (found,) = [each for each in judge(book.claim(claim_id), book).findings if each.rule == rule]
    return found


# The founding figures that cannot stand: claim, rule, verdict, what the claim amounts to, the limit, words of the
# sentence (all worked out apart from the rules), and a figure that could stand instead.
CASES = [
    ("t4-matmul-fp32", "compute_peak", "implausible", 12e12, 8.1e12, "8.1 TFLOP/s", {"value": 7.5}),
    ("esp32-mobilenet-rate", "compute_peak", "implausible", 2 * 15e9, 2 * 7.68e9, "15 GMAC/s", {"value": 5}),
    ("5090-mobilenet-efficiency", "efficiency", "doubtful", 75e9 / 104.8e12, 0.01, "0.07%", None),
    ("4090-flash-8192", "compute_peak", "implausible", 188.28e12, 165.2e12, "188.3 TFLOP/s", {"value": 5.5}),
    ("4090-flash-growth", "growth", "implausible", 2, 1, "4 times with each doubling", {"value": 2}),
    ("3090-llama-compiled", "bandwidth", "implausible", 1020.6e9, 936e9, "1,092 GB/s", {"value": 58}),
    ("3090-llama-flash-memory", "own_weights", "implausible", 14.25 * 2**30, 16.06e9, "16.06 GB", {"value": 16.3}),
    ("3090-llama-awq-memory", "own_weights", "implausible", 4.75 * 2**30, 5.591e9, "5.59 GB", {"value": 5.7}),
    ("4090-train-bf16-ratio", "printed_result", "implausible", 842 / 336, 2.2, "842 / 336 = 2.51", {"value": 2.5}),
    ("mistral-nf4-ratio", "printed_result", "implausible", 45.23 / 28.40, 1.8, "1.59", {"value": 1.6}),
    ("mistral-all", "backward_only", "implausible", 19.5 / 16.1, 1, "backward pass", {"value": 19.6}),
    ("gpu-poor-overhead", "fixed_overhead", "implausible", 17.47, 6.22, "17.5 times the time for 6.2 times", None),
    ("gpu-poor-large-speed", "contradiction", "doubtful", 0.99, 0.95, "0.95x as well as 0.99x", {"value": 0.95}),
    ("cpu-llama-q4", "unnamed_hardware", "doubtful", None, None, "no hardware", None),
]  # fmt: skip


@pytest.mark.parametrize(("claim_id", "rule", "verdict", "implied", "limit", "words", "_"), CASES)
def test_a_rule_finds_a_figure_that_cannot_stand_and_shows_the_arithmetic(
    claim_id: str, rule: str, verdict: str, implied: float | None, limit: float | None, words: str, _: Any
) -> None:
    found = finding(claim_id, rule)
    assert found.plausibility == verdict
    assert found.implied == (implied if implied is None else pytest.approx(implied, rel=2e-3))
    assert found.limit == (limit if limit is None else pytest.approx(limit, rel=2e-3))
    assert words in found.sentence
    assert judge(BOOK.claim(claim_id), BOOK).plausibility in BROKEN


@pytest.mark.parametrize(
    ("claim_id", "rule", "changed_id", "changes"),
    [
        *((case[0], case[1], case[0], case[-1]) for case in CASES if case[-1]),
        # 20 us for an image: 29% of the peak, so the power was used for something
        ("5090-mobilenet-efficiency", "efficiency", "5090-mobilenet-latency", {"value": 0.02}),
        # 0.95 implies 3.4 times the time for 6.2 times the size
        ("gpu-poor-overhead", "fixed_overhead", "gpu-poor-large-speed", {"value": 0.95}),
        ("cpu-llama-q4", "unnamed_hardware", "cpu-llama-q4", {"hardware": "AMD EPYC 9654"}),
        ("mistral-all", "backward_only", "mistral-fused", {"value": 16.1}),
        ("mistral-all", "backward_only", "mistral-all", {"workload": "train_step"}),
    ],
)
def test_the_rule_is_silent_when_the_figure_and_what_it_rests_on_are_plausible(
    claim_id: str, rule: str, changed_id: str, changes: dict[str, Any]
) -> None:
    book = changed(changed_id, **changes)
    found = [each for each in judge(book.claim(claim_id), book).findings if each.rule == rule]
    assert [each for each in found if each.plausibility in BROKEN] == []


def test_a_claim_that_no_rule_speaks_of_is_unchecked_and_not_plausible() -> None:
    judged = judge(BOOK.claim("3090-llama-bf16-perplexity"), BOOK)
    assert (judged.plausibility, judged.findings) == (Plausibility.UNCHECKED, ())


def test_the_verdict_is_the_worst_finding_and_names_what_decided() -> None:
    judged = judge(BOOK.claim("3090-llama-compiled"), BOOK)
    assert {each.rule for each in judged.findings} == {"compute_peak", "bandwidth"}
    assert [each.rule for each in judged.reasons] == ["bandwidth"]


def test_a_rate_that_a_higher_clock_could_explain_is_only_doubtful() -> None:
    book = changed("t4-matmul-fp32", value=8.5)
    assert finding("t4-matmul-fp32", "compute_peak", book).plausibility is Plausibility.DOUBTFUL


def test_a_model_that_fits_a_cache_is_not_bound_by_memory_bandwidth() -> None:
    book = changed("t4-gpt2-int4", value=1e6)
    found = judge(book.claim("t4-gpt2-int4"), book).findings
    assert "bandwidth" not in {each.rule for each in found}


@given(st.floats(min_value=0.1, max_value=1e5))
def test_the_bandwidth_rule_condemns_exactly_what_the_memory_cannot_deliver(rate: float) -> None:
    found = finding("3090-llama-bf16", "bandwidth", changed("3090-llama-bf16", value=rate))
    read = 2 * (8_030_261_248 - 128256 * 4096)
    if abs(rate * read / 936e9 - 1) > 0.001:
        assert (found.plausibility is Plausibility.IMPLAUSIBLE) == (rate * read > 936e9)


@given(st.sampled_from(BOOK.claims), st.floats(min_value=1e-6, max_value=1e9))
def test_every_rule_answers_for_any_figure(claim: Claim, value: float) -> None:
    book = changed(claim.id, value=value)
    judged = judge(book.claim(claim.id), book)
    assert all(each.sentence.endswith(".") for each in judged.findings)
    assert [each.sentence for each in judged.findings if re.search(r"\de[+-]?\d", each.sentence)] == []


@pytest.mark.parametrize(
    ("claim_id", "value", "words"),
    [
        ("gpu-poor-large-saved", 60, "1 - 767 / 2,953 = 74%, but it is printed as 60%"),
        ("lesson-factors", 18, "2 x 2 x 2 = 8, but it is printed as 18"),
    ],
)
def test_a_saving_and_a_product_are_computed_again(claim_id: str, value: float, words: str) -> None:
    assert finding(claim_id, "printed_result").plausibility is Plausibility.PLAUSIBLE
    wrong = finding(claim_id, "printed_result", changed(claim_id, value=value))
    assert wrong.plausibility is Plausibility.IMPLAUSIBLE
    assert words in wrong.sentence


def test_attention_that_may_be_causal_is_granted_half_the_work() -> None:
    full = finding("4090-flash-8192", "compute_peak").implied
    causal = finding("4090-flash-8192", "compute_peak", changed("4090-flash-8192", causal=True))
    silent = finding("4090-flash-8192", "compute_peak", changed("4090-flash-8192", causal=None))
    assert full is not None
    assert causal.implied == silent.implied == pytest.approx(full / 2, rel=1e-3)
    assert causal.plausibility is Plausibility.PLAUSIBLE


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


@pytest.mark.parametrize(
    ("value", "unit", "low", "high"),
    [(2.2, "x", 2.15, 2.25), (16.0, "GB", 15.5e9, 16.5e9), (45.23, "ms", 0.045225, 0.045235)],
)
def test_rounding_is_half_of_the_last_printed_digit(value: float, unit: str, low: float, high: float) -> None:
    claim = BOOK.claims[0].model_copy(update={"value": value, "unit": unit})
    assert rounded(claim) == pytest.approx((low, high))


def test_a_claim_finds_the_best_figure_of_the_same_thing_on_hardware_of_its_name() -> None:
    assert found_for("t4-gpt2-int8", a_result(100.0), a_result(161.2), a_result(90.0)) == 161.2


@pytest.mark.parametrize(
    "other",
    [
        {"hardware": "1x NVIDIA L4 22 GiB"},
        {"hardware": "Tesla T4 simulator 2 cores"},
        {"stack": ()},
        {"stack": ("int8_weight_only", "nf4")},
        {"model": "preset:gpt2-medium"},
        {"workload": {"kind": "prefill", "batch_size": 1}},
        {"name": "requests_per_s"},
        {"stack": ("int8_weight_only", "autocast")},
        {"valid": False},
        {"value": None},
    ],
    ids=str,
)
def test_a_figure_of_something_else_is_not_taken_for_it(other: dict[str, Any]) -> None:
    assert found_for("t4-gpt2-int8", a_result(**other)) is None


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
    ("changed", "expected"),
    [
        ({}, 0.002),
        ({"implementations": ["fused"]}, None),
        ({"lengths": [2048]}, None),
        ({"dtype": "float32"}, None),
        ({"heads": 16}, None),
        ({"causal": True}, None),
    ],
    ids=str,
)
def test_attention_is_the_same_by_implementation_length_dtype_heads_and_mask(
    changed: dict[str, Any], expected: float | None
) -> None:
    workload = {
        "kind": "attention", "lengths": [1024], "implementations": ["standard"], "batch_size": 4,
        "heads": 12, "head_size": 64, "causal": False, "dtype": "float16",
    } | changed  # fmt: skip
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
