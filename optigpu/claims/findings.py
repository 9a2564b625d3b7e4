"""The findings of the rules."""

from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum

from optigpu.claims.model import Book, Claim
from optigpu.claims.terms import UNITS
from optigpu.vocabulary import Frozen


class Plausibility(StrEnum):
    """`plausible` passed the rules that apply; `doubtful` contradicts itself or cannot be checked, though no limit
    forbids the figure; `implausible` breaks arithmetic or a limit of the hardware; `unchecked`: no rule applies.
    """

    UNCHECKED = "unchecked"
    PLAUSIBLE = "plausible"
    DOUBTFUL = "doubtful"
    IMPLAUSIBLE = "implausible"


class RuleFinding(Frozen):
    """The finding of one rule: the arithmetic in a sentence, and its two numbers in the sentence's unit.

    `implied` is what the claim's own figures amount to, `limit` what it was held against.
    """

    rule: str
    plausibility: Plausibility
    sentence: str
    implied: float | None = None
    limit: float | None = None


Rule = Callable[[Claim, Book], RuleFinding | None]
"""A pure function; None means that the rule does not apply to the claim."""


def rounded(claim: Claim) -> tuple[float, float]:
    """The smallest and the largest quantity that round to the printed figure."""
    text = repr(claim.value).removesuffix(".0")
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return (claim.value - half) * UNITS[claim.unit], (claim.value + half) * UNITS[claim.unit]


def plain(number: float, digits: int = 3) -> str:
    """A number rounded to significant digits, never with an exponent: 1234.5 is 1,230."""
    return format(Decimal(f"{number:.{digits}g}"), ",f")


def percent(share: float) -> str:
    """A share in percent: whole numbers from 10 on, one digit below."""
    return f"{plain(100 * share, 1)}%" if share < 0.095 else f"{100 * share:,.0f}%"


def printed(claim: Claim) -> str:
    """The figure as it was printed: `148 tok/s`, `at least 98%`, `1.3 to 1.8x`."""
    to = "" if claim.to is None else f" to {plain(claim.to, 12)}"
    space = "" if claim.unit.startswith(("%", "x")) else " "
    return f"{claim.bound + ' ' if claim.bound else ''}{plain(claim.value, 12)}{to}{space}{claim.unit}"
