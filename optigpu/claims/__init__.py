"""Published figures: what they claim, whether it is possible, and what was measured on the same hardware."""

from optigpu.claims.founding import FoundingComparison, compare_founding
from optigpu.claims.matching import (
    Measured,
    beside,
    from_leaderboard,
    from_results,
    measured_for,
    says_too_little,
    why_never,
)
from optigpu.claims.model import Book, Claim, Plausibility, RuleFinding, Status, baselines, read_book
from optigpu.claims.rules import RULES, Judgement, judge
from optigpu.claims.thesis import Thesis, gap_of, weigh

__all__ = [
    "RULES",
    "Book",
    "Claim",
    "FoundingComparison",
    "Judgement",
    "Measured",
    "Plausibility",
    "RuleFinding",
    "Status",
    "Thesis",
    "baselines",
    "beside",
    "compare_founding",
    "from_leaderboard",
    "from_results",
    "gap_of",
    "judge",
    "measured_for",
    "read_book",
    "says_too_little",
    "weigh",
    "why_never",
]
