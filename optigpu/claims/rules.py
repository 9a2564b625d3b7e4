"""All rules, and the judgement of a claim: against its own text, others that it is made of, and limits."""

import math

from optigpu.claims.limits import bandwidth, compute_peak, efficiency, own_weights
from optigpu.claims.model import (
    NEEDS_HARDWARE,
    Book,
    Claim,
    Plausibility,
    Rule,
    RuleFinding,
    checked,
    percent,
    plain,
    printed,
    rounded,
)
from optigpu.claims.work import flop_per_item, weights_of
from optigpu.hardware.catalog import find
from optigpu.vocabulary import Frozen

BACKWARD_ONLY = frozenset({"gradient_checkpointing", "gradient_accumulation"})
"""Techniques that act on the backward pass, which inference does not have."""
EXPONENT_MARGIN = 0.5
"""How far the claimed power may be below the power of the work: half the distance between 1 and 2."""


def contradiction(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags two figures for the same subject in one text."""
    others = [
        other
        for other in book.claims
        if other.id != claim.id and other.text == claim.text and other.subject == claim.subject
    ]
    other = next((each for each in others if (each.quantity, each.to) != (claim.quantity, claim.to)), None)
    if other is None:
        return None
    off = max(other.quantity, claim.quantity) / min(other.quantity, claim.quantity) - 1
    return RuleFinding(
        rule="contradiction",
        plausibility=Plausibility.DOUBTFUL,
        sentence=(
            f"The same text says {printed(other)} as well as {printed(claim)}: one of them is {percent(off)} off."
        ),
        implied=claim.quantity,
        limit=other.quantity,
    )


def unnamed_hardware(claim: Claim, _: Book) -> RuleFinding | None:
    """Flags a figure that depends on hardware that is not named or not in the catalog."""
    if claim.metric not in NEEDS_HARDWARE or claim.ratio_of:
        return None
    if claim.hardware is None:
        sentence = "The text names no hardware, so the figure cannot be repeated or checked against a limit."
    elif find(claim.hardware) is None:
        sentence = f"The catalog has no entry for the {claim.hardware}, so its limits cannot be checked."
    else:
        return None
    return RuleFinding(rule="unnamed_hardware", plausibility=Plausibility.DOUBTFUL, sentence=sentence)


def growth(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags time that is claimed to grow with a lower power of the size than the work does."""
    if claim.metric != "growth_exponent" or len(claim.series) < 2:
        return None
    first, last = book.claim(claim.series[0]), book.claim(claim.series[-1])
    work = [flop_per_item(each, book) for each in (first, last)]
    if not (first.sequence and last.sequence and work[0] and work[1]):
        return None
    longer, more = last.sequence / first.sequence, work[1] / work[0]
    slower = last.quantity / first.quantity
    power = math.log(more) / math.log(longer)
    sentence = (
        f"From length {first.sequence} to {last.sequence} the time grows {plain(slower)} times, while the work "
        f"grows {plain(more)} times ({plain(2**power)} times with each doubling): the power is "
        f"{plain(power, 2)}, and {plain(claim.value)} is claimed."
    )
    return checked("growth", claim.quantity < power - EXPONENT_MARGIN, sentence, power, claim.quantity)


def backward_only(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags a technique of the backward pass that is claimed to make inference faster."""
    used = BACKWARD_ONLY & set(claim.techniques or ())
    if not used or claim.workload == "train_step" or claim.metric != "latency_s":
        return None
    without = tuple(name for name in claim.techniques or () if name not in used)
    bare = claim.model_copy(update={"techniques": without}).subject
    other = next((each for each in book.claims if each.text == claim.text and each.subject == bare), None)
    if other is None:
        return None
    faster = claim.quantity < other.quantity
    sentence = (
        f"{' and '.join(sorted(used))} acts on the backward pass, which inference does not have, "
        f"{'yet' if faster else 'and'} with it {plain(other.value, 12)} becomes {printed(claim)} "
        f"({plain(other.quantity / claim.quantity)} times as fast)."
    )
    return checked("backward_only", faster, sentence, other.quantity / claim.quantity, 1.0)


def fixed_overhead(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags a fixed overhead that implies run times that do not fit the sizes of the models. A speed s of a run that
    takes t without the overhead o means s = t / (t + o), so t = o s / (1 - s)."""
    if claim.metric != "overhead_s" or len(claim.series) < 2:
        return None
    small, large = book.claim(claim.series[0]), book.claim(claim.series[-1])
    few, many = weights_of(small.model), weights_of(large.model)
    if few is None or many is None or max(small.quantity, large.quantity) >= 1:
        return None
    times = [_time(claim.quantity, each.quantity) for each in (small, large)]
    bigger = many.total / few.total
    # What a step costs besides its weights makes time grow more slowly than size, never faster. Rounding of both speeds
    # is granted.
    off = _time(1.0, rounded(large)[0]) / _time(1.0, rounded(small)[1]) > bigger
    sentence = (
        f"With {plain(claim.value)} {claim.unit} of overhead, {plain(small.value)}x means a run of "
        f"{plain(times[0])} s and {plain(large.value)}x one of {plain(times[1])} s: "
        f"{plain(times[1] / times[0])} times the time for {plain(bigger, 2)} times the size."
    )
    return checked("fixed_overhead", off, sentence, times[1] / times[0], bigger)


def _time(overhead_s: float, speed: float) -> float:
    return overhead_s * speed / (1 - speed)


def printed_result(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags a printed ratio, saving or product that does not follow from its figures, rounding allowed for."""
    parts = [book.claim(each) for each in claim.ratio_of or claim.saving_of or claim.product_of]
    if not parts:
        return None
    one, *others = (plain(part.value, 12) for part in parts)
    low, high = (math.prod(rounded(part)[end] for part in parts) for end in (0, 1))
    text, value = " x ".join((one, *others)), math.prod(part.quantity for part in parts)
    if claim.ratio_of:
        over, under = parts
        text, value = f"{one} / {others[0]}", over.quantity / under.quantity
        low, high = rounded(over)[0] / rounded(under)[1], rounded(over)[1] / rounded(under)[0]
    elif claim.saving_of:
        before, after = parts
        text, value = f"1 - {others[0]} / {one}", 1 - after.quantity / before.quantity
        low, high = 1 - rounded(after)[1] / rounded(before)[0], 1 - rounded(after)[0] / rounded(before)[1]
    off = rounded(claim)[1] < low or rounded(claim)[0] > high
    shown = percent if claim.unit == "%" else plain
    how = "but it is printed as" if off else "printed as"
    sentence = f"{text} = {shown(value)}, {how} {shown(claim.quantity)}."
    return checked("printed_result", off, sentence, value, claim.quantity)


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
        return tuple(each for each in self.findings if each.plausibility is self.plausibility)


def judge(claim: Claim, book: Book) -> Judgement:
    findings = tuple(finding for rule in RULES if (finding := rule(claim, book)))
    worst = max((each.plausibility for each in findings), key=_ORDER.index, default=Plausibility.UNCHECKED)
    return Judgement(plausibility=worst, findings=findings)
