"""Operations and bytes behind a claim's figure; all rules, and the judgement of a claim.

It is judged against its own text, others that it is made of, the limits of the named hardware and the size of the
model's weights. The claim has the benefit of the doubt: bytes are the fewest that the format needs, memory is read in
the larger of two units, and peaks are the highest that the precision allows.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from optigpu.claims.model import (
    BINARY_UNITS,
    NEEDS_HARDWARE,
    UNITS,
    Book,
    Claim,
    Plausibility,
    Precision,
    Rule,
    RuleFinding,
    checked,
    percent,
    plain,
    printed,
    rounded,
)
from optigpu.hardware.catalog import Device, Dtype, find
from optigpu.models.described import facts_of
from optigpu.models.families import family_of
from optigpu.models.reference import PRESETS, ModelReference
from optigpu.vocabulary import Frozen

TRAINING_FACTOR = 3
"""Operations of a training step over those of a forward pass: the backward pass has two products for each one."""


@dataclass(frozen=True)
class Weights:
    """The matrices of a decoder as counts of weights, without norms and biases (at most a thousandth). `embedding`
    holds the tables of which a decode step reads one row (tokens, unless the head is tied to them; positions), `head`
    the projection to the vocabulary, which each step reads whole."""

    blocks: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return self.blocks + self.embedding + self.head


@lru_cache
def weights_of(model: str | None) -> Weights | None:
    """The weights of a preset, counted from its shapes; None if it is not a decoder."""
    if model is None or model not in PRESETS:
        return None
    facts = facts_of(ModelReference(kind="preset", name=model))
    if facts is None or facts.work is None:
        return None
    table = facts.vocabulary * facts.embedding_size
    positions = facts.longest * facts.hidden_size if family_of(facts.family).learns_positions else 0
    return Weights(
        blocks=facts.work.flops // 2,
        embedding=positions + (0 if facts.tied_head else table),
        head=table,
    )


class NumberFormat(NamedTuple):
    """Bytes per weight of the blocks' matrices, and of embedding and head, without scales and zero points."""

    block_bytes: float
    table_bytes: float


NUMBER_FORMATS: dict[Precision, NumberFormat] = {
    "fp32": NumberFormat(4, 4),
    "fp16": NumberFormat(2, 2),
    "bf16": NumberFormat(2, 2),
    "int8": NumberFormat(1, 1),
    "int4": NumberFormat(0.5, 0.5),
    "q4_k_m": NumberFormat(0.5, 0.5),
    # bitsandbytes, GPTQ and AWQ checkpoints quantize the blocks and leave embedding and head at 16 bits.
    "llm_int8": NumberFormat(1, 2),
    "nf4": NumberFormat(0.5, 2),
    "gptq": NumberFormat(0.5, 2),
    "awq": NumberFormat(0.5, 2),
}
"""The fewest bytes that a weight takes in each precision."""

ARITHMETIC: dict[Precision, tuple[Dtype, ...]] = {
    "fp32": ("fp32",),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
    "int8": ("int8", "fp16", "fp32"),
    "llm_int8": ("int8", "fp16"),
    "int4": ("int4", "int8", "fp16", "fp32"),
    "nf4": ("fp16", "bf16"),
    "gptq": ("fp16", "bf16"),
    "awq": ("fp16", "bf16"),
    "q4_k_m": ("int8", "fp16", "fp32"),
}
"""The dtypes that each precision may be computed in; quantized weights are often converted first."""


def peak_flop_per_s(claim: Claim, device: Device) -> float | None:
    """The highest rate at which the device can do the claim's operations; None where the catalog does not know."""
    dtypes = ARITHMETIC[claim.precision] if claim.precision else ()
    if claim.precision == "fp32" and claim.workload in ("classify", "train_step"):
        dtypes = (*dtypes, "tf32")  # PyTorch's convolutions use it by default
    known = device.peak_flop_per_s
    return max((known[dtype] for dtype in dtypes if dtype in known), default=None)


def flop_per_item(claim: Claim, book: Book) -> float | None:
    """Operations for one image, one token, or one call of attention; None if the claim lacks the needed facts."""
    match claim.workload:
        case "classify" | "train_step":
            macs = book.macs_of(claim.model)
            passes = TRAINING_FACTOR if claim.workload == "train_step" else 1
            return 2 * macs * passes if macs else None
        case "attention" if claim.batch_size and claim.heads and claim.head_dim and claim.sequence:
            # Two products of head_dim for each pair of a query and a key; the softmax between them is not counted.
            # Where the text does not say, there are as few pairs as in causal attention.
            length = claim.sequence
            pairs = length**2 if claim.causal is False else length * (length + 1) / 2
            return 4.0 * claim.batch_size * claim.heads * claim.head_dim * pairs
        case "generate" if weights := weights_of(claim.model):
            return 2.0 * (weights.blocks + weights.head)
        case _:
            return None


def flop_per_s(claim: Claim, book: Book) -> float | None:
    """The rate of operations that a claim implies; None where its figure implies none."""
    if claim.metric == "tflops":
        return claim.quantity * 1e12
    flop = flop_per_item(claim, book)
    if flop is None:
        return None
    if claim.metric in ("images_per_s", "tokens_per_s"):
        return claim.quantity * flop
    if claim.metric == "latency_s" and claim.workload in ("classify", "attention"):
        items = (claim.batch_size or 1) if claim.workload == "classify" else 1
        return items * flop / claim.quantity
    return None


CLOCK_MARGIN = 1.1
"""Cards boost above the clock of their published peak by less than this factor."""
LARGEST_CACHE_BYTES = 1.2e9
"""Smaller models may fit in a cache (AMD EPYC 9684X: 1,152 MB), where memory bandwidth is no limit."""
IDLE_SHARE = 0.01
"""Below this share of the peak, a figure describes the software rather than the hardware."""


def compute_peak(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags more operations per second than the hardware's peak for the precision."""
    device, rate = find(claim.hardware or ""), flop_per_s(claim, book)
    peak = peak_flop_per_s(claim, device) if device else None
    if rate is None or peak is None:
        return None
    relation = "above" if rate > peak else f"{percent(rate / peak)} of"
    return RuleFinding(
        rule="compute_peak",
        plausibility=_against_peak(rate, peak),
        sentence=f"{_operations(claim, book, rate)}, {relation} its peak of {_rate(peak, claim)}.",
        implied=rate,
        limit=peak,
    )


def bandwidth(claim: Claim, _: Book) -> RuleFinding | None:
    """Flags more bytes of weights per second than the memory bandwidth; the KV cache is not counted."""
    device, weights = find(claim.hardware or ""), weights_of(claim.model)
    limit = device.memory_bandwidth_bytes_per_s if device else None
    if claim.metric != "tokens_per_s" or not (device and limit and weights and claim.precision):
        return None
    form = NUMBER_FORMATS[claim.precision]
    read = weights.blocks * form.block_bytes + weights.head * form.table_bytes
    if read < LARGEST_CACHE_BYTES:
        return None
    whole = read + weights.embedding * form.table_bytes
    steps = claim.quantity / (claim.batch_size or 1)
    above = steps * read > limit
    rows = f" ({steps * read / 1e9:,.0f} without the embedding, of which a step reads one row)"
    sentence = (
        f"{plain(steps)} steps/s x {whole / 1e9:.2f} GB of weights is {steps * whole / 1e9:,.0f} GB/s"
        f"{rows if weights.embedding else ''}, {'above' if above else f'{percent(steps * read / limit)} of'} its "
        f"memory's {limit / 1e9:,.0f} GB/s."
    )
    return checked("bandwidth", above, sentence, steps * read, limit)


def own_weights(claim: Claim, _: Book) -> RuleFinding | None:
    """Flags less memory than the weights alone take."""
    weights = weights_of(claim.model)
    if claim.metric not in ("peak_bytes", "weight_bytes", "host_peak_bytes") or not (
        weights and claim.precision
    ):
        return None
    form = NUMBER_FORMATS[claim.precision]
    tables = weights.head + weights.embedding
    least = weights.blocks * form.block_bytes + tables * form.table_bytes
    most = rounded(claim)[1] / UNITS[claim.unit] * BINARY_UNITS[claim.unit]
    if form.block_bytes == form.table_bytes:
        parts = f"{plain(weights.total / 1e9)} billion of {form.block_bytes:g} B"
    else:
        parts = (
            f"{plain(weights.blocks / 1e9)} billion of {form.block_bytes:g} B, and {plain(tables / 1e9)} billion of "
            f"embedding and head that the format leaves at {form.table_bytes:g} B"
        )
    below = most < least
    sentence = (
        f"{printed(claim)} is at most {_bytes(most)} (binary units, rounding), "
        f"{'below' if below else 'not below'} the {_bytes(least)} of the model's own weights: {parts}."
    )
    return checked("own_weights", below, sentence, most, least)


def efficiency(claim: Claim, book: Book) -> RuleFinding | None:
    """Flags work per energy that rests on an impossible rate, or on an almost idle device."""
    if claim.rate_of is None or claim.power_of is None:
        return None
    rated, device = book.claim(claim.rate_of), find(claim.hardware or "")
    rate, peak = flop_per_s(rated, book), peak_flop_per_s(rated, device) if device else None
    if rate is None or peak is None:
        return None
    share, power = rate / peak, book.claim(claim.power_of).quantity
    plausibility, remark = _against_peak(rate, peak), ""
    if share < IDLE_SHARE:
        plausibility, remark = Plausibility.DOUBTFUL, ": the device was almost idle"
    return RuleFinding(
        rule="efficiency",
        plausibility=plausibility,
        sentence=(
            f"{_operations(rated, book, rate)}, {percent(share)} of its peak of {_rate(peak, rated)}, at "
            f"{plain(power)} W{remark}."
        ),
        implied=share,
        limit=IDLE_SHARE if share < IDLE_SHARE else 1.0,
    )


def _against_peak(rate: float, peak: float) -> Plausibility:
    if rate <= peak:
        return Plausibility.PLAUSIBLE
    return Plausibility.IMPLAUSIBLE if rate > CLOCK_MARGIN * peak else Plausibility.DOUBTFUL


def _operations(claim: Claim, book: Book, rate: float) -> str:
    """The figure as a rate: `50 FPS at 0.6 GOP each is 30 GOP/s (15 GMAC/s)`."""
    figure, flop = printed(claim), flop_per_item(claim, book)
    if flop is None or claim.metric == "tflops":
        return figure
    batched = claim.workload == "classify" and claim.metric == "latency_s" and (claim.batch_size or 1) > 1
    batch = f" for {claim.batch_size} images" if batched else ""
    return f"{figure}{batch} at {plain(flop / 1e9)} G{_unit(claim)} each is {_rate(rate, claim)}"


def _rate(flop: float, claim: Claim) -> str:
    if flop >= 1e12:
        return f"{plain(flop / 1e12, 4)} T{_unit(claim)}/s"
    macs = f" ({plain(flop / 2e9)} GMAC/s)" if claim.workload == "classify" else ""
    return f"{plain(flop / 1e9, 4)} G{_unit(claim)}/s{macs}"


def _unit(claim: Claim) -> str:
    return "OP" if claim.precision in ("int8", "int4") else "FLOP"


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


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
