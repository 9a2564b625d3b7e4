"""The leaderboard as a table and as flat records, and the table of a comparison of two results."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_lowercase

from optigpu.documents.views import (
    Board,
    ComparedResult,
    Comparison,
    Decision,
    LeaderboardPage,
    LeaderboardRow,
    MetricComparison,
    Standing,
)
from optigpu.report.formats import MISSING, NOT_VALID, Column, Grid, columns, csv_text, short, with_interval
from optigpu.report.others import others_grid
from optigpu.report.rows import HEADINGS, WARNINGS, heading
from optigpu.vocabulary import Document, Task
from optigpu.workloads import WORKLOADS


def leaderboard_grids(page: LeaderboardPage) -> tuple[Grid, ...]:
    """A table for each board; one that says why there is none if there is no board. What others measured follows."""
    boards = tuple(leaderboard_grid(board) for board in page.boards)
    empty = Grid(title="Leaderboard", columns=_columns(""), rows=(), notes=(page.note or "",))
    return (*(boards or (empty,)), *map(others_grid, page.others))


def leaderboard_grid(board: Board) -> Grid:
    """The rows of a board, best first. Hardware that all rows have is in the title."""
    hardware = {row.hardware for row in board.rows}
    common = hardware.pop() if len(hardware) == 1 else None
    warnings = sorted({warning for row in board.rows for warning in row.warnings})
    letters = dict(zip(warnings, ascii_lowercase, strict=False))  # the notes explain them
    quality = _where_any(  # with two decimals: losses are tenths of a percent
        board.rows, lambda row: MISSING if row.top1_agreement is None else f"{100 * row.top1_agreement:.2f}"
    )
    energy = _where_any(board.rows, lambda row: short(row.j_per_token))
    title = f"Leaderboard by {heading(board.metric)}: {workload_text(board.workload, board.model)}"
    grid = Grid(
        title=f"{title} on {common}" if common else title,
        columns=_columns(heading(board.metric)),
        rows=tuple(
            _cells(row, "" if row.hardware == common else row.hardware, figures, letters)
            for row, *figures in zip(board.rows, quality, energy, strict=True)
        ),
        notes=tuple(_notes(board, letters)),
        faint=frozenset(number for number, row in enumerate(board.rows) if row.rank is None),
    )
    return grid.without_empty_columns() if board.rows else grid


def _columns(figure: str) -> tuple[Column, ...]:
    return columns(
        "rank:", "variant", f"{figure}:", "weights (MB):", "quality (%):", "J/token:", "Pareto", "hardware", "status",
        "warnings",
    )  # fmt: skip


def _where_any(rows: Sequence[LeaderboardRow], cell: Callable[[LeaderboardRow], str]) -> list[str]:
    """The cells of a column; all empty if no row has a value."""
    cells = [cell(row) for row in rows]
    return cells if set(cells) - {MISSING} else [""] * len(cells)


def _cells(
    row: LeaderboardRow, hardware: str, figures: Sequence[str], letters: Mapping[str, str]
) -> tuple[str, ...]:
    megabytes = None if row.weight_bytes is None else row.weight_bytes * 1e-6
    return (
        MISSING if row.rank is None else str(row.rank),
        row.label,
        with_interval(row.value.model_dump()),
        short(megabytes),
        *figures,
        {True: "yes", False: "no", None: MISSING}[row.pareto],
        hardware,
        _status(row),
        " ".join(sorted(letters[warning] for warning in row.warnings)),
    )


def _status(row: LeaderboardRow) -> str:
    """Why a row has no rank, or what its rank lacks."""
    if row.standing is Standing.INVALID:
        return f"invalid: {', '.join(row.reasons)}"
    return "earlier" if row.standing is Standing.EARLIER else "superseded" if row.superseded else ""


NOT_SHOWN = ("kind", "trace")
"""Fields of a workload: the kind stands before the others, and a trace has a line for each request."""
LONGEST_PROMPT = 40
"""Characters of a text prompt that a title shows."""


def workload_text(workload: Document, model: str | None) -> str:
    """A workload on one line: `generate preset:gpt2 32+64 x1`, `matmul float32 1024`. An old document that lacks one of
    today's fields is shown by the fields that it has."""
    if workload.get("kind") == "generate" and workload.keys() >= {"prompt_tokens", "new_tokens"}:
        prompt = workload.get("prompt")
        begin = workload["prompt_tokens"]
        if prompt:
            end = "..." if len(prompt) > LONGEST_PROMPT else ""
            begin = json.dumps(prompt[:LONGEST_PROMPT] + end, ensure_ascii=False)
        shape = " ".join(
            [
                f"{begin}+{workload['new_tokens']}",
                *(
                    _shape(key, workload[key])
                    for key in ("batch_size", "memory_limit_bytes")
                    if key in workload
                ),
            ]
        )
        if workload.get("temperature"):
            part = f", top_p {workload['top_p']:g}" if workload["top_p"] < 1 else ""
            shape += f" at temperature {workload['temperature']:g}{part}"
        return f"generate {model} {shape}"
    shapes = (
        _shape(key, value) for key, value in workload.items() if key not in NOT_SHOWN and value is not None
    )
    return " ".join(part for part in (workload.get("kind"), model, *shapes) if part)


def models_text(spec: Document) -> str | None:
    """The model of a stored job, or its models, in one text."""
    return ", ".join(spec.get("models") or ()) or spec.get("model")


def asked_text(spec: Document) -> str:
    """What a stored job asks for on one line: its workload and models, without a batch that batch_scaling looks for."""
    looked_for = {"batch_size"} if spec.get("plan") == "batch_scaling" else set()
    workload = {name: value for name, value in spec["workload"].items() if name not in looked_for}
    return workload_text(workload, models_text(spec))


_SHAPES = {
    "batch_size": "x{}", "batch_sizes": "x{}", "sequence_tokens": "{} tokens", "shortest_tokens": "from {}",
    "learning_rate": "at {}", "new_tokens": "+{}", "image_size": "{} px", "heads": "{} heads",
    "kv_heads": "sharing {}", "head_size": "of {}", "rows": "{} rows", "rates": "{} per s",
    "clients": "{} clients", "queries": "{} queries", "prompt_tokens_most": "to {}",
    "new_tokens_most": "to {}", "slots": "{} slots", "block_tokens": "blocks of {}", "ttft_s": "ttft to {} s",
    "tpot_s": "tpot to {} s", "memory_limit_bytes": "under {} bytes",
}  # fmt: skip
"""How a field of a workload is written; other fields are written by their value alone."""


def _shape(key: str, value: object) -> str:
    """One field on a line: values joined by slashes, booleans by name."""
    name = key.removesuffix("s")

    def word(each: object) -> str:
        if isinstance(each, bool):
            return name if each else f"no {name}"
        return f"{each:g}" if isinstance(each, float) else str(each)

    values = value if isinstance(value, (list, tuple)) else [value]
    return _SHAPES.get(key, "{}").format("/".join(map(word, values)))


def _notes(board: Board, letters: Mapping[str, str]) -> Iterator[str]:
    if not board.rows:
        yield board.note or "There are no more rows."
        return
    better = board.better.capitalize()
    yield f"{better} is better. ± and [ ] are 95% intervals; rows whose intervals overlap share a rank."
    yield why_no_quality(board) or (
        "quality: the share of positions at which the most likely token is the same as the fp32 model's."
    )
    if any(row.pareto is not None for row in board.rows):
        yield (
            "Pareto: no other row of the same workload and hardware is as good in speed, memory, quality and energy, "
            "and better in one; what was not measured counts as the worst."
        )
    yield from _statuses(board)
    if len(board.rows) < board.row_count:
        yield f"{len(board.rows)} of {board.row_count} rows; workload={board.workload_digest} lists all."
    for warning, letter in letters.items():
        yield f"{letter}: {warning}: {WARNINGS.get(warning, warning)}."


def why_no_quality(board: Board) -> str | None:
    """Why none of a board's rows has one; None where any has."""
    if any(row.top1_agreement is not None for row in board.rows):
        return None
    kind = str(board.workload.get("kind"))
    if kind in WORKLOADS and WORKLOADS[kind].task not in (Task.DECODING, Task.IMAGES):
        return f"{kind} decodes nothing, so there is no quality."
    if board.model and board.model.startswith("preset:"):
        return "The weights are random, so quality was not measured."
    return "Quality was not measured."


def _statuses(board: Board) -> Iterator[str]:
    """The meaning of each status, and what is left out."""
    if any(row.superseded and row.rank is not None for row in board.rows):
        yield "superseded: the variant was since measured with later versions on other hardware."
    if any(row.standing is Standing.EARLIER for row in board.rows):
        yield "earlier: a result with later versions or better support has taken its place."
    if any(row.standing is Standing.INVALID for row in board.rows):
        return
    if board.not_ranked:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in board.not_ranked.items())
        yield f"Not ranked: {reasons}. Invalid results are listed with include_invalid=true."


CSV_FIELDS = (
    "rank", "label", "model", "workload", "techniques", "backend", "device", "hardware",
    "metric", "unit", "value", "ci_low", "ci_high", "replicates",
    "weight_bytes", "peak_bytes", "top1_agreement", "kld_mean", "j_per_token",
    "pareto", "standing", "superseded", "earlier", "warnings", "reasons", "source", "measured_at",
    "result_id", "job_id", "workload_digest", "variant_digest",
)  # fmt: skip
"""The columns of the CSV form."""


def leaderboard_csv(page: LeaderboardPage) -> str:
    """The rows of all boards as raw values in SI units; empty where a value is missing."""
    return csv_text(CSV_FIELDS, leaderboard_records(page))


def leaderboard_records(page: LeaderboardPage) -> list[dict[str, object]]:
    """The lines of the CSV form, each with a value or None for every one of CSV_FIELDS."""
    records = (_record(row) for board in page.boards for row in board.rows)
    return [{field: record.get(field) for field in CSV_FIELDS} for record in records]


def _record(row: LeaderboardRow) -> dict[str, object]:
    low, high = row.value.ci or (None, None)
    same = row.model_dump(mode="json", include=set(CSV_FIELDS))
    return same | {
        "workload": workload_text(row.workload, None),
        "techniques": " ".join(row.techniques),
        "unit": row.value.unit,
        "value": row.value.value,
        "ci_low": low,
        "ci_high": high,
        "replicates": row.value.replicates,
        "warnings": " ".join(row.warnings),
        "reasons": " ".join(row.reasons),
    }


LONGEST_VALUE = 60


def comparison_grid(comparison: Comparison) -> Grid:
    """A line for each metric: both values, their ratio (or difference) with its interval, and the decision."""
    baseline, candidate = comparison.baseline, comparison.candidate
    return Grid(
        title=f"{candidate.label} against {baseline.label}: "
        f"{workload_text(candidate.workload, candidate.model)} on {candidate.hardware}",
        columns=columns("metric", "baseline:", "candidate:", "ratio [95% interval]:", "decision"),
        rows=tuple(_compared(name, metric, comparison) for name, metric in _measured(comparison).items()),
        notes=tuple(_comparison_notes(comparison)),
    )


def _measured(comparison: Comparison) -> dict[str, MetricComparison]:
    """The metrics that at least one side has a value of."""
    return {
        name: metric
        for name, metric in comparison.metrics.items()
        if metric.baseline is not None or metric.candidate is not None
    }


def _compared(name: str, metric: MetricComparison, comparison: Comparison) -> tuple[str, ...]:
    return (
        HEADINGS.get(name) or (name if metric.unit == "1" else f"{name} ({metric.unit})"),
        _compared_figure(metric.baseline, comparison.baseline),
        _compared_figure(metric.candidate, comparison.candidate),
        change_text(metric),
        f"different, {metric.decision}"
        if metric.decision in (Decision.BETTER, Decision.WORSE)
        else metric.decision or MISSING,
    )


def change_text(metric: MetricComparison) -> str:
    """For example "5.0x [4.6, 5.9]", or "+0.12 [0.05, 0.19]" for a difference."""
    ratio, difference, digits = metric.ratio, metric.difference, 2
    if metric.ci is not None:
        digits = _digits(metric.ci[1] - metric.ci[0])
    elif metric.exact and ratio is not None:  # what was counted is shown as finely as it differs from 1
        digits = _digits(abs(ratio - 1))
    interval = f" [{metric.ci[0]:.{digits}f}, {metric.ci[1]:.{digits}f}]" if metric.ci else ""
    if ratio is not None:
        return f"{ratio:.{digits}f}x{interval}"
    if difference is None:
        return MISSING
    return f"{difference:+.{digits}f}{interval}" if interval else f"{difference:+.3g}"


def _digits(width: float) -> int:
    """Digits behind the point that show two of so small a width."""
    return min(max(1 - math.floor(math.log10(width)), 0), 6) if width > 0 else 2


def _legend(comparison: Comparison, shown: dict[str, MetricComparison]) -> Iterator[str]:
    """What the decisions that occur mean."""
    found = {metric.decision for metric in shown.values() if not metric.exact}
    yield "ratio: candidate over baseline."
    if Decision.BETTER in found or Decision.WORSE in found:
        yield "different: the interval does not contain 1 (0 for a difference)."
    percent = f"{100 * comparison.margin:g}%"
    if Decision.EQUIVALENT in found:
        yield f"equivalent: the ratio's 90% interval lies within {percent} of 1."
    for name, metric in shown.items():
        if metric.decision is Decision.UNDECIDED and metric.reason is None and metric.ci:
            centre = "1" if metric.ratio is not None else "0"
            interval = change_text(metric).partition(" ")[2]
            wider = f" and reaches beyond {percent} of it" if metric.ratio is not None else ""
            yield f"{name}: undecided: the interval {interval} contains {centre}{wider}."


def _compared_figure(value: float | None, side: ComparedResult) -> str:
    """A side's value, marked if its result is not valid."""
    return short(value) if side.valid or value is None else short(value) + NOT_VALID


def _comparison_notes(comparison: Comparison) -> Iterator[str]:
    yield from comparison.notes
    if not (comparison.baseline.valid and comparison.candidate.valid):
        yield "!: of a result that is not valid."
    shown = _measured(comparison)
    if shown:
        yield from _legend(comparison, shown)
    else:
        yield "The two results have no metric in common."
    reasons: dict[str, list[str]] = {}
    for name, metric in shown.items():
        if metric.reason:
            reasons.setdefault(metric.reason, []).append(name)
    for reason, names in reasons.items():
        yield f"{'all' if len(names) == len(shown) else ', '.join(names)}: {reason}"
    if unknown := comparison.metrics.keys() - shown.keys():
        yield f"measured on neither side: {', '.join(sorted(unknown))}"
    for difference in comparison.differences:
        before, after = _cut(difference.baseline), _cut(difference.candidate)
        yield f"differs: {difference.field}: {before} -> {after}"


def _cut(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
