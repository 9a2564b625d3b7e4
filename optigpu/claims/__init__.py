"""Published figures: what they claim, whether it is possible, and what was measured on the same hardware."""

from optigpu.claims.matching import Measured as Measured
from optigpu.claims.matching import beside as beside
from optigpu.claims.matching import from_leaderboard as from_leaderboard
from optigpu.claims.matching import from_results as from_results
from optigpu.claims.matching import measured_for as measured_for
from optigpu.claims.matching import says_too_little as says_too_little
from optigpu.claims.matching import why_never as why_never
from optigpu.claims.model import Book as Book
from optigpu.claims.model import Claim as Claim
from optigpu.claims.model import Plausibility as Plausibility
from optigpu.claims.model import RuleFinding as RuleFinding
from optigpu.claims.model import Status as Status
from optigpu.claims.model import baselines as baselines
from optigpu.claims.model import read_book as read_book
from optigpu.claims.rules import Judgement as Judgement
from optigpu.claims.rules import judge as judge
from optigpu.claims.thesis import FoundingComparison as FoundingComparison
from optigpu.claims.thesis import Thesis as Thesis
from optigpu.claims.thesis import compare_founding as compare_founding
from optigpu.claims.thesis import gap_of as gap_of
from optigpu.claims.thesis import weigh as weigh
