"""The book of published figures: what it holds, where it is from, how it is read and printed."""

import pytest
from pydantic import ValidationError

from optigpu.claims import baselines, read_book
from optigpu.claims.findings import printed, rounded

BOOK = baselines()


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
