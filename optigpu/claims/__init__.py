"""Published figures: the claims, their plausibility, and measurements on the same hardware."""

from optigpu.claims.findings import Plausibility, RuleFinding
from optigpu.claims.measured import Measured, from_leaderboard, from_results, measured_for
from optigpu.claims.model import Book, Claim, Status, baselines, read_book
from optigpu.claims.rules import RULES, Judgement, judge
from optigpu.claims.thesis import Thesis, gap_of, weigh

__all__ = [
    "RULES",
    "Book",
    "Claim",
    "Judgement",
    "Measured",
    "Plausibility",
    "RuleFinding",
    "Status",
    "Thesis",
    "baselines",
    "from_leaderboard",
    "from_results",
    "gap_of",
    "judge",
    "measured_for",
    "read_book",
    "weigh",
]
