"""All rules, and the judgement of a claim."""

from optigpu.claims.arithmetic import printed_result
from optigpu.claims.findings import Plausibility, Rule, RuleFinding
from optigpu.claims.limits import bandwidth, compute_peak, efficiency, own_weights
from optigpu.claims.logic import (
    backward_only,
    contradiction,
    fixed_overhead,
    growth,
    unnamed_hardware,
)
from optigpu.claims.model import Book, Claim
from optigpu.vocabulary import Frozen

RULES: tuple[Rule, ...] = (
    compute_peak,
    bandwidth,
    own_weights,
    efficiency,
    printed_result,
    contradiction,
    growth,
    backward_only,
    fixed_overhead,
    unnamed_hardware,
)
"""Every rule is applied to every claim; no rule refers to a claim by id."""

_ORDER = tuple(Plausibility)


class Judgement(Frozen):
    """The judgement of a claim: the worst of its findings."""

    plausibility: Plausibility
    findings: tuple[RuleFinding, ...] = ()

    @property
    def reasons(self) -> tuple[RuleFinding, ...]:
        """The findings that decided."""
        return tuple(each for each in self.findings if each.plausibility is self.plausibility)


def judge(claim: Claim, book: Book) -> Judgement:
    """Applies all rules to a claim."""
    findings = tuple(finding for rule in RULES if (finding := rule(claim, book)))
    worst = max((each.plausibility for each in findings), key=_ORDER.index, default=Plausibility.UNCHECKED)
    return Judgement(plausibility=worst, findings=findings)
