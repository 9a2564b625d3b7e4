"""Rules that check a claim against its own text: ratios, contradictions, growth, missing hardware."""

import math

from optigpu.claims.findings import Plausibility, RuleFinding, rounded
from optigpu.claims.model import Book, Claim
from optigpu.claims.work import flop_per_item, weights_of
from optigpu.hardware.catalog import find

NEEDS_HARDWARE = frozenset(
    {"tflops", "tokens_per_s", "images_per_s", "latency_s", "step_s", "speedup", "power_w", "images_per_j"}
)
"""Metrics that depend on the machine. Bytes and quality do not; growth and ratios depend on other claims."""
BACKWARD_ONLY = frozenset({"gradient_checkpointing", "gradient_accumulation"})
"""Techniques that act on the backward pass, which inference does not have."""
EXPONENT_MARGIN = 0.5
"""How far the claimed power may be below the power of the work: half the distance between 1 and 2."""


def printed_ratio(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags a printed ratio that does not follow from its two figures, rounding allowed for."""
    if claim.ratio_of is None:
        return None
    over, under = (book.claim(each) for each in claim.ratio_of)
    low = rounded(over)[0] / rounded(under)[1]
    high = rounded(over)[1] / rounded(under)[0]
    off = rounded(claim)[1] < low or rounded(claim)[0] > high
    quotient = over.quantity / under.quantity
    return RuleFinding(
        rule="printed_ratio",
        plausibility=Plausibility.IMPLAUSIBLE if off else Plausibility.PLAUSIBLE,
        sentence=(
            f"{over.value:g} / {under.value:g} = {quotient:.2f}, {'but it is printed as' if off else 'printed as'} "
            f"{claim.value:g}."
        ),
        implied=quotient,
        limit=claim.quantity,
    )


def contradiction(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags two figures for the same subject in one text."""
    others = [
        other
        for other in book.claims
        if other.id != claim.id and other.text == claim.text and other.subject == claim.subject
    ]
    other = next((each for each in others if each.quantity != claim.quantity), None)
    if other is None:
        return None
    return RuleFinding(
        rule="contradiction",
        plausibility=Plausibility.DOUBTFUL,
        sentence=(
            f"The same text says {other.value:g} {other.unit} as well as {claim.value:g} {claim.unit}: "
            f"one of them is {max(other.quantity, claim.quantity) / min(other.quantity, claim.quantity) - 1:.0%} off."
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
    off = claim.quantity < power - EXPONENT_MARGIN
    return RuleFinding(
        rule="growth",
        plausibility=Plausibility.IMPLAUSIBLE if off else Plausibility.PLAUSIBLE,
        sentence=(
            f"From length {first.sequence} to {last.sequence} the time grows {slower:.3g} times, while the work grows "
            f"{more:.3g} times ({2**power:.3g} times with each doubling): the power is {power:.2g}, and "
            f"{claim.value:g} is claimed."
        ),
        implied=power,
        limit=claim.quantity,
    )


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
    return RuleFinding(
        rule="backward_only",
        plausibility=Plausibility.IMPLAUSIBLE if faster else Plausibility.PLAUSIBLE,
        sentence=(
            f"{' and '.join(sorted(used))} acts on the backward pass, which inference does not have, "
            f"{'yet' if faster else 'and'} with it {other.value:g} becomes {claim.value:g} {claim.unit} "
            f"({other.quantity / claim.quantity:.2f} times as fast)."
        ),
        implied=other.quantity / claim.quantity,
        limit=1.0,
    )


def fixed_overhead(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags a fixed overhead that implies run times that do not fit the sizes of the models.

    A speed s of a run that takes t without the overhead o means s = t / (t + o), so t = o s / (1 - s).
    """
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
    return RuleFinding(
        rule="fixed_overhead",
        plausibility=Plausibility.IMPLAUSIBLE if off else Plausibility.PLAUSIBLE,
        sentence=(
            f"With {claim.value:g} {claim.unit} of overhead, {small.value:g}x means a run of {times[0]:.3g} s and "
            f"{large.value:g}x one of {times[1]:.3g} s: {times[1] / times[0]:.3g} times the time for "
            f"{bigger:.2g} times the size."
        ),
        implied=times[1] / times[0],
        limit=bigger,
    )


def _time(overhead_s: float, speed: float) -> float:
    return overhead_s * speed / (1 - speed)
