"""The table of a job: each variant's speed, and the speedup of each technique alone, added to the others, and against
the whole without it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optigpu.documents.result import Attribution, Gain, Payback
from optigpu.documents.versions import facts_of
from optigpu.report.formats import Grid, columns, csv_text
from optigpu.report.leaderboard import workload_text
from optigpu.report.numbers import MISSING, NOT_VALID, payback, ratio, scaled, short, with_interval
from optigpu.report.rows import Row, empty_cells, heading, ladder_notes, origin_line, rows_of
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
