"""The table of a job: each variant's speed, and the speedup of each technique alone, added to the others, and against
the whole without it.

And the part that a person reads first: one sentence, one table that fits 80 columns, and at most four notes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optigpu.documents.result import Attribution, Gain, Payback, VerdictWarning
from optigpu.documents.versions import facts_of
from optigpu.report.formats import (
    FRAME,
    MISSING,
    NOT_VALID,
    Grid,
    columns,
    csv_text,
    least_width,
    payback,
    ratio,
    scaled,
    short,
    with_error,
    with_interval,
)
from optigpu.report.leaderboard import workload_text
from optigpu.report.rows import (
    WARNINGS,
    Row,
    carriers_of,
    empty_cells,
    heading,
    ladder_notes,
    origin_line,
    rows_of,
    why_invalid,
    words_of,
)
from optigpu.vocabulary import METRICS, Document, Role, VariantStatus


@dataclass(frozen=True)
class Scenario:
    """A scenario of MLPerf Inference (Reddi et al., 2019, arXiv:1911.02549). It is judged by `field` of the summary of
    `metric`, times `scale`, under `heading`; `meaning` goes below the table."""

    metric: str
    field: str
    scale: float
    heading: str
    meaning: str

    def figure(self, row: Row) -> str:
        value = (row.metric(self.metric) or {}).get(self.field)
        return MISSING if value is None else short(value * self.scale)

    def notes(self, rows: Sequence[Row]) -> Iterator[str]:
        """Notes on the meaning of the column, and on empty cells."""
        yield f"{self.meaning} The rules of its published results are stricter."
        lacking = [row for row in rows if row.result and self.figure(row) == MISSING]
        reasons = ((row.label, (row.metric(self.metric) or {}).get("reason")) for row in lacking)
        yield from empty_cells(self.heading, reasons)


_OF_PROCESSES = "of each process, averaged over the processes."
SCENARIOS = {
    "SingleStream": Scenario(
        "latency_s", "p90", 1e3, "p90 latency (ms)", "p90 latency: what MLPerf's scenario SingleStream is judged by, "
        f"one query after the other; {_OF_PROCESSES}",
    ),
    "Server": Scenario(
        "latency_s", "p99", 1e3, "p99 latency (ms)", "p99 latency: what MLPerf's scenario Server is judged by, queries "
        f"that come by chance at a rate; {_OF_PROCESSES}",
    ),
    "Offline": Scenario(
        "requests_per_s", "value", 1.0, "samples/s", "samples/s: what MLPerf's scenario Offline is judged by, all "
        "queries at once.",
    ),
}  # fmt: skip


def scenario_of(rows: Sequence[Row]) -> Scenario | None:
    """The scenario of a job's results, if they have the same one and any of them has its figure."""
    names = {facts_of(row.result).get("scenario") for row in rows if row.result}
    found = SCENARIOS.get(str(names.pop())) if len(names) == 1 else None
    return found if found and any(found.figure(row) != MISSING for row in rows) else None


FURTHER_METRICS = {
    "ttft_s": ("TTFT (ms)", 1e3), "latency_s": ("latency (ms)", 1e3), "goodput_per_s": ("goodput/s", 1.0),
    "queue_length": ("queue", 1.0), "highest_rate_per_s": ("highest rate/s", 1.0),
    "trained_tokens_per_s": ("trained tokens/s", 1.0), "weight_bytes": ("weights (MB)", 1e-6),
    "peak_bytes": ("peak (MB)", 1e-6), "top1_agreement": ("top-1 (%)", 100.0),
    "alone_agreement": ("as alone (%)", 100.0), "accuracy": ("accuracy (%)", 100.0),
    "kld_mean": ("KLD (nat)", 1.0), "loss_deviation": ("loss deviation", 1.0),
    "j_per_token": ("J/token", 1.0), "j_per_image": ("J/image", 1.0),
    "j_per_1000_tokens": ("J/1,000 tokens", 1.0), "mfu": ("MFU (%)", 100.0), "hfu": ("HFU (%)", 100.0),
    "headroom": ("headroom", 1.0),
}  # fmt: skip
"""Metrics that are shown beside the primary one if any variant has them: heading and scale."""
METRICS_OF_SOME_WORKLOADS = {
    "latency_s": ("batch_sweep", "serve", "classify", "attention", "normalization"),
    "peak_bytes": ("attention", "normalization", "kernel", "train_step"),
    "mfu": ("train_step",),
}
"""Metrics that are shown for these workloads only."""


def ladder_grid(title: str, attribution: Attribution, results: Sequence[Document]) -> Grid:
    """The table of a job, without columns that are empty for it."""
    rows = rows_of(attribution, results)
    further = further_metrics(rows)
    scenario = scenario_of(rows)
    names = (
        heading(attribution.metric),
        "speedup",
        "alone",
        "added",
        "left out",
        "over compiled",
        "paid back (steps)",
    )
    more = (*([scenario.heading] if scenario else []), *(FURTHER_METRICS[name][0] for name in further))
    grid = Grid(
        title=title,
        columns=columns("variant", *(f"{name}:" for name in (*names, *more)), "status"),
        rows=tuple(_cells(row, attribution, scenario, further) for row in rows),
        notes=(
            *ladder_notes(rows, attribution, [attribution.metric, *further]),
            *(scenario.notes(rows) if scenario else ()),
            *filter(None, [origin_line(results)]),
        ),
        faint=frozenset(number for number, row in enumerate(rows) if not row.valid),
    )
    return grid.without_empty_columns()


def further_metrics(rows: Sequence[Row]) -> list[str]:
    """The names of FURTHER_METRICS that any of the variants has a figure to show of."""
    return [
        name
        for name in FURTHER_METRICS
        if any(
            row.has_figure(name) and row.workload in METRICS_OF_SOME_WORKLOADS.get(name, (row.workload,))
            for row in rows
        )
    ]


def _cells(
    row: Row, attribution: Attribution, scenario: Scenario | None, further: Sequence[str]
) -> tuple[str, ...]:
    ended, figure = row.ended, with_interval(row.metric(attribution.metric))
    mark = NOT_VALID if row.has_figure(attribution.metric) and not row.valid else ""
    best = " *" if ended.index == attribution.best and len(attribution.rows) > 1 else ""
    return (
        ended.label + best,
        figure + mark,
        _gain(ended.speedup, ended.role not in (Role.SINGLE, Role.BASELINE)),
        _gain(ended.alone, ended.role is Role.ALONE),
        _gain(ended.added, ended.role is Role.CUMULATIVE),
        _gain(ended.left_out, False),
        _gain(ended.over_compiled, False),
        payback(ended.payback),
        *([scenario.figure(row)] if scenario else []),
        *(_figure(row, name) for name in further),
        _status(row),
    )


def _figure(row: Row, name: str) -> str:
    figure = scaled(row.metric(name), FURTHER_METRICS[name][1])
    bound = row.result.get("bound") if row.result and name == "headroom" else None
    return f"{figure}x, {bound}" if bound else figure


def _gain(gain: Gain | None, expected: bool) -> str:
    """Blank where the gain has no meaning; "-" where it is missing."""
    return ratio(gain) if gain or expected else ""


def _status(row: Row) -> str:
    if row.result is None:
        return str(row.ended.status)
    if not row.valid:
        return "invalid"
    return "ok, warned" if row.warnings else "ok"


CSV_FIELDS = (
    "index", "role", "label", "technique", "status", "valid", "warnings",
    "metric", "unit", "value", "ci_low", "ci_high", "replicates",
    "speedup", "speedup_low", "speedup_high", "speedup_reasons",
    "alone", "alone_low", "alone_high", "alone_reasons",
    "added", "added_low", "added_high", "added_reasons",
    "left_out", "left_out_low", "left_out_high", "left_out_reasons", "left_out_with",
    "over_compiled", "over_compiled_low", "over_compiled_high", "over_compiled_reasons",
    "payback_steps", "payback_low", "payback_high", "payback_reason",
    "ttft_s", "weight_bytes", "peak_bytes", "host_peak_bytes",
    "top1_agreement", "kld_mean", "j_per_token", "mbu", "mfu", "headroom", "bound", "reason",
    "result_id", "created_at", "workload", "model", "backend", "hardware", "torch", "driver", "commit",
)  # fmt: skip
"""The columns of the CSV form."""


def ladder_csv(attribution: Attribution, results: Sequence[Document]) -> str:
    """The table as raw values in SI units, a line for each variant; empty where a value is missing."""
    return csv_text(CSV_FIELDS, ladder_records(attribution, results))


def ladder_records(attribution: Attribution, results: Sequence[Document]) -> list[dict[str, object]]:
    """The lines of the CSV form, each with a value or None for every one of CSV_FIELDS."""
    records = (_record(row, attribution.metric) for row in rows_of(attribution, results))
    return [{field: record.get(field) for field in CSV_FIELDS} for record in records]


def _record(row: Row, name: str) -> dict[str, object]:
    ended, metric = row.ended, row.metric(name) or {}
    low, high = metric.get("ci") or (None, None)
    record: dict[str, object] = {
        "index": ended.index,
        "role": str(ended.role),
        "label": ended.label,
        "technique": ended.technique,
        "status": str(ended.status),
        "valid": row.valid if ended.status is VariantStatus.SUCCEEDED else None,
        "warnings": " ".join(row.warnings),
        "metric": name,
        "unit": METRICS[name].unit,
        "value": metric.get("value"),
        "ci_low": low,
        "ci_high": high,
        "replicates": metric.get("replicates"),
        "bound": row.result.get("bound") if row.result else None,
        "reason": ended.reason,
        **(_origin(row.result) if row.result else {}),
    }
    names = ("speedup", "alone", "added", "left_out", "over_compiled")
    gains: dict[str, Gain | None] = {name: getattr(ended, name) for name in names}
    for field, gain in gains.items():
        reasons = " ".join(gain.reasons) if gain else None
        record |= _flat(field, gain) | {field: gain.ratio if gain else None, f"{field}_reasons": reasons}
    found = ended.payback
    record |= {"left_out_with": " ".join(ended.left_out_with)} | _flat("payback", found)
    record |= {"payback_steps": found.steps, "payback_reason": found.reason} if found else {}
    for field in CSV_FIELDS[CSV_FIELDS.index("ttft_s") : CSV_FIELDS.index("bound")]:
        record[field] = (row.metric(field) or {}).get("value")
    return record


def _origin(result: Document) -> dict[str, object]:
    """What a line needs to be read without the others."""
    variant, environment = result["variant"], result["environment"]
    return {
        "result_id": result["id"],
        "created_at": result["created_at"],
        "workload": workload_text(variant["workload"], variant["model"]),
        "model": variant["model"],
        "backend": variant["backend"],
        "hardware": environment["hardware_class"],
        "torch": (environment.get("software") or {}).get("torch"),
        "driver": environment.get("driver"),
        "commit": environment.get("git_revision"),
    }


def _flat(field: str, found: Gain | Payback | None) -> dict[str, object]:
    low, high = found.ci if found and found.ci else (None, None)
    return {f"{field}_low": low, f"{field}_high": high}


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
        (f"{heading(attribution.metric)}:", [_brief_figure(row, attribution.metric) for row in rows]),
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


def _brief_figure(row: Row, metric: str) -> str:
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
