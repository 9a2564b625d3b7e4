"""The book of published figures: what it holds, where it is from, how it is read and printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from optigpu.claims import Status, baselines, read_book
from optigpu.claims.findings import percent, plain, printed, rounded
from optigpu.vocabulary import METRICS, SpecError

BOOK = baselines()


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
