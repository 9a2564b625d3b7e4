"""What a person reads first of a job: one sentence, one table that fits 80 columns, and at most four notes.

The table with all columns and notes is ladder.py's.
"""

from collections.abc import Iterator, Sequence

from optigpu.documents.result import Attribution, VerdictWarning
from optigpu.report.formats import FRAME, Grid, columns, least_width
from optigpu.report.ladder import FURTHER_METRICS, further_metrics
from optigpu.report.numbers import MISSING, NOT_VALID, scaled, short, with_error
from optigpu.report.rows import (
    WARNINGS,
    Row,
    carriers_of,
    heading,
    origin_line,
    rows_of,
    why_invalid,
    words_of,
)
from optigpu.vocabulary import Document, Role

WIDTH = 80
MOST_NOTES = 4
FASTEST, INVALID, NO_RESULT, WARNED = "*", "!", "x", "~"
"""The marks of rows; each stands for the first of these that holds."""
FIRST = ("weight_bytes", "top1_agreement", "loss_deviation", "kld_mean", "ttft_s")
"""The columns that matter most; others follow while they fit."""
DISTURBED = "Speeds marked ! are of a disturbed machine; the two took turns and shared what disturbed them."
OTHER_WORK = frozenset({VerdictWarning.DISTURBED, VerdictWarning.SHARED_HOST})


def brief_grid(title: str, attribution: Attribution, results: Sequence[Document], width: int = WIDTH) -> Grid:
    """The table of a job, below a headline where there is something to compare."""
    rows = rows_of(attribution, results)
    marks = [_mark(row, attribution, _shared(rows)) for row in rows]
    found = [
        ("variant", [row.label for row in rows]),
        (f"{heading(attribution.metric)}:", [_figure(row, attribution.metric) for row in rows]),
        ("times:", [_times(row) for row in rows]),
        *_further(rows, attribution.metric),
    ]
    while len(found) > 3 and _width(found) > width:
        found.pop()
    found.append(("", marks))
    grid = Grid(
        title="\n".join(filter(None, (title, headline(rows)))),
        columns=columns(*(name for name, _ in found)),
        rows=tuple(zip(*(cells for _, cells in found), strict=True)),
        notes=tuple(_notes(rows, results)),
        faint=frozenset(number for number, row in enumerate(rows) if not row.valid),
    )
    return grid.without_empty_columns()


def headline(rows: Sequence[Row]) -> str | None:
    """What the variant with the highest valid ratio buys and costs beside the baseline; None for a single variant."""
    if len(rows) < 2 or all(row.ended.role is not Role.BASELINE for row in rows):
        return None
    gains = [(row.ended.speedup, row) for row in rows if row.ended.speedup and row.ended.speedup.valid]
    if not gains:
        return "No variant here has a valid ratio to the baseline."
    gain, best = max(gains, key=lambda each: each[0].ratio)
    baseline = next(row for row in rows if row.ended.index == gain.compared_with)
    shared = "" if best.valid and baseline.valid else f" {DISTURBED}"
    if gain.ratio <= 1:
        return f"Nothing that was measured here is faster than the baseline.{shared}"
    interval = f" [{short(gain.ci[0])} to {short(gain.ci[1])}]" if gain.ci else ""
    now, before = ((row.metric("weight_bytes") or {}).get("value") for row in (best, baseline))
    share = f", with {now / before:.0%} of the bytes of its weights" if now and before else ""
    fast = f"{best.label} is {short(gain.ratio)} times as fast as the baseline here{interval}{share}"
    return f"{fast}; {_cost(best)}.{shared}"


def _cost(row: Row) -> str:
    agreement = (row.metric("top1_agreement") or {}).get("value")
    if agreement is None:
        return "its loss of quality was not measured"
    if agreement == 1:
        return "it picks the same tokens"
    return f"it picks another token in {100 * (1 - agreement):.2g}% of places"


def _further(rows: Sequence[Row], primary: str) -> Iterator[tuple[str, list[str]]]:
    """The columns beside speed that any variant has a figure for, rough ones too, the most important first."""
    names = {*further_metrics(rows), *(name for row in rows for name in _rough(row))} - {primary}
    order = [*FIRST, *(name for name in FURTHER_METRICS if name not in FIRST)]
    for name in sorted(names, key=order.index):
        title, scale = FURTHER_METRICS[name]
        yield f"{title}:", [scaled(row.metric(name) or _rough(row).get(name), scale) for row in rows]


def _rough(row: Row) -> dict[str, Document]:
    """What is roughly known beside speed of a variant without a result, as summaries."""
    if row.result is not None or row.ended.rough is None:
        return {}
    found = row.ended.rough.model_dump(include={"weight_bytes", "kld_mean", "top1_agreement"})
    return {name: {"value": value} for name, value in found.items() if value is not None}


def _width(found: Sequence[tuple[str, Sequence[str]]]) -> int:
    """What a terminal needs for these columns and the marks."""
    heads = columns(*(name for name, _ in found))
    texts = ((head.heading, *cells) for head, (_, cells) in zip(heads, found, strict=True))
    widths = (
        least_width(head, each, leads=place == 0)
        for place, (head, each) in enumerate(zip(heads, texts, strict=True))
    )
    return sum(width + FRAME for width in widths) + FRAME + 2


def _figure(row: Row, metric: str) -> str:
    """`602 ±7%`: the value with the longer side of its 95% interval; `about 602 ±7%` where it is rough."""
    rough = row.ended.rough
    if row.result is None and rough:
        return f"about {with_error(rough.value, rough.ci)}"
    found = row.metric(metric)
    if not found or found["value"] is None:
        return MISSING
    return with_error(found["value"], found.get("ci"))


def _times(row: Row) -> str:
    gain, rough = row.ended.speedup, row.ended.rough
    if row.result is None and rough and rough.ratio:
        return f"about {short(rough.ratio)}x"
    return "" if gain is None else f"{short(gain.ratio)}x{'' if gain.valid else NOT_VALID}"


def _shared(rows: Sequence[Row]) -> frozenset[str]:
    """The warnings of all valid results."""
    each = [frozenset(row.warnings) for row in rows if row.valid]
    return frozenset.intersection(*each) if each else frozenset()


def _mark(row: Row, attribution: Attribution, shared: frozenset[str]) -> str:
    if row.result is None:
        return NO_RESULT if row.ended.reason else ""  # it has not ended
    if not row.valid:
        return INVALID
    if row.ended.index == attribution.best and len(attribution.rows) > 1:
        return FASTEST
    return WARNED if set(row.warnings) - shared - OTHER_WORK else ""


def _notes(rows: Sequence[Row], results: Sequence[Document]) -> Iterator[str]:
    """The most important first; what there is no room for is in the whole table."""
    notes = [*_reasons(rows), *_warnings(rows)]
    origin = list(filter(None, [origin_line(results)]))
    room = MOST_NOTES - len(origin)
    if len(notes) > room:
        left = len(notes) - (room - 1)
        notes = [*notes[: room - 1], f"{left} more notes are in `optigpu show`."]
    yield from (*notes, *origin)


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why variants have no valid result, each reason once."""
    labels: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.result is None:
            labels.setdefault((NO_RESULT, f"{row.ended.status}: {row.ended.reason}"), []).append(row.label)
        elif not row.valid:
            why = f"not ranked, because {why_invalid(row.result)}."
            labels.setdefault((INVALID, why), []).append(row.label)
    for (mark, why), those in labels.items():
        yield f"{mark} {', '.join(those)}: {why}"


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    """What other work on the machine did; then the warnings of all valid results, and those of some of them."""
    carriers, shared = carriers_of(rows), _shared(rows)
    if OTHER_WORK & carriers.keys():
        yield "Other work used this machine meanwhile; the intervals include what it can have cost."
    words = [words_of(WARNINGS, warning) for warning in carriers if warning in shared - OTHER_WORK]
    if words:
        yield f"All rows: {'; '.join(words)}."
    for warning, those in carriers.items():
        if warning not in shared | OTHER_WORK:
            yield f"{WARNED} {', '.join(those)}: {words_of(WARNINGS, warning)}."
