"""Rules that check a claim against the limits of the named hardware and the size of the model's weights. The claim has
the benefit of the doubt: bytes are the fewest that the format needs, memory is read in the larger of two units, and
peaks are the highest that the precision allows."""

from optigpu.claims.model import (
    BINARY_UNITS,
    UNITS,
    Book,
    Claim,
    Plausibility,
    RuleFinding,
    checked,
    percent,
    plain,
    printed,
    rounded,
)
from optigpu.claims.work import NUMBER_FORMATS, flop_per_item, flop_per_s, peak_flop_per_s, weights_of
from optigpu.hardware.catalog import find

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
