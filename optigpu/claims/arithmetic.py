"""The rule that checks a claim that is made of others: a printed ratio, saving or product."""

import math
from dataclasses import dataclass

from optigpu.claims.findings import Plausibility, RuleFinding, percent, plain, rounded
from optigpu.claims.model import Book, Claim


@dataclass(frozen=True)
class _Computed:
    """What the figures amount to: as they are printed, and between which bounds as they are rounded."""

    text: str
    value: float
    low: float
    high: float


def printed_result(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags a printed ratio, saving or product that does not follow from its figures, rounding allowed for."""
    computed = _ratio(claim, book) or _saving(claim, book) or _product(claim, book)
    if computed is None:
        return None
    off = rounded(claim)[1] < computed.low or rounded(claim)[0] > computed.high
    result, printed = _shown(claim, computed.value), _shown(claim, claim.quantity)
    return RuleFinding(
        rule="printed_result",
        plausibility=Plausibility.IMPLAUSIBLE if off else Plausibility.PLAUSIBLE,
        sentence=f"{computed.text} = {result}, {'but it is printed as' if off else 'printed as'} {printed}.",
        implied=computed.value,
        limit=claim.quantity,
    )


def _ratio(claim: Claim, book: Book) -> _Computed | None:
    if claim.ratio_of is None:
        return None
    over, under = (book.claim(side) for side in claim.ratio_of)
    return _Computed(
        f"{_printed(over)} / {_printed(under)}",
        over.quantity / under.quantity,
        rounded(over)[0] / rounded(under)[1],
        rounded(over)[1] / rounded(under)[0],
    )


def _saving(claim: Claim, book: Book) -> _Computed | None:
    if claim.saving_of is None:
        return None
    before, after = (book.claim(side) for side in claim.saving_of)
    return _Computed(
        f"1 - {_printed(after)} / {_printed(before)}",
        1 - after.quantity / before.quantity,
        1 - rounded(after)[1] / rounded(before)[0],
        1 - rounded(after)[0] / rounded(before)[1],
    )


def _product(claim: Claim, book: Book) -> _Computed | None:
    factors = [book.claim(factor) for factor in claim.product_of]
    if not factors:
        return None
    return _Computed(
        " x ".join(map(_printed, factors)),
        math.prod(factor.quantity for factor in factors),
        math.prod(rounded(factor)[0] for factor in factors),
        math.prod(rounded(factor)[1] for factor in factors),
    )


def _printed(claim: Claim) -> str:
    return plain(claim.value, 12)


def _shown(claim: Claim, quantity: float) -> str:
    return percent(quantity) if claim.unit == "%" else plain(quantity)
