"""The findings of the rules."""

from collections.abc import Callable
from enum import StrEnum

from optigpu.claims.model import UNITS, Book, Claim
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
