"""The leaderboard as a table and as flat records."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_lowercase

from optigpu.documents.views import Board, LeaderboardPage, LeaderboardRow, Standing
from optigpu.report.formats import Column, Grid, columns, csv_text
from optigpu.report.notes import WARNINGS
from optigpu.report.numbers import MISSING, short, with_interval
from optigpu.report.rows import heading
from optigpu.vocabulary import Document


def leaderboard_grids(page: LeaderboardPage) -> tuple[Grid, ...]:
    """A table for each board; one that says why there is none if there is no board."""
    if page.boards:
        return tuple(leaderboard_grid(board) for board in page.boards)
    return (Grid(title="Leaderboard", columns=_columns(""), rows=(), notes=(page.note or "",)),)


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
    if any(row.top1_agreement is not None for row in board.rows):
        yield "quality: the share of positions at which the most likely token is the same as the fp32 model's."
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
