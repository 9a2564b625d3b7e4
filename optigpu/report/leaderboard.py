"""The leaderboard as a table and as flat records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_lowercase

from optigpu.documents.views import LeaderboardPage, LeaderboardRow
from optigpu.report.formats import Column, Grid, csv_text
from optigpu.report.notes import WARNINGS
from optigpu.report.numbers import MISSING, short, with_interval
from optigpu.report.rows import heading
from optigpu.vocabulary import Document


def leaderboard_grid(page: LeaderboardPage) -> Grid:
    """The rows of a page, best first. Values common to all rows are in the title."""
    workloads = [workload_text(row.workload, row.model) for row in page.rows]
    hardware = [row.hardware for row in page.rows]
    common = [values[0] for values in (workloads, hardware) if len(set(values)) == 1]
    letters = _letters(page.rows)
    quality = _where_any(page.rows, lambda row: _percent(row.top1_agreement))
    energy = _where_any(page.rows, lambda row: short(row.j_per_token))
    grid = Grid(
        title=": ".join(
            [f"Leaderboard by {heading(page.metric)}", *([" on ".join(common)] if common else [])]
        ),
        columns=_columns(page.metric),
        rows=tuple(
            _cells(
                row,
                "" if workload in common else workload,
                "" if row.hardware in common else row.hardware,
                figures,
                letters,
            )
            for row, workload, *figures in zip(page.rows, workloads, quality, energy, strict=True)
        ),
        notes=tuple(_notes(page, letters)),
    )
    return grid.without_empty_columns() if page.rows else grid


def _columns(metric: str) -> tuple[Column, ...]:
    return (
        Column("rank", right=True),
        Column("variant"),
        Column(heading(metric), right=True),
        Column("workload"),
        Column("weights (MB)", right=True),
        Column("quality (%)", right=True),
        Column("J/token", right=True),
        Column("Pareto"),
        Column("hardware"),
        Column("warnings"),
    )


def _where_any(rows: Sequence[LeaderboardRow], cell: Callable[[LeaderboardRow], str]) -> list[str]:
    """The cells of a column; all empty if no row has a value."""
    cells = [cell(row) for row in rows]
    return cells if set(cells) - {MISSING} else [""] * len(cells)


def _percent(share: float | None) -> str:
    """Two decimals: losses are tenths of a percent."""
    return MISSING if share is None else f"{100 * share:.2f}"


def _letters(rows: Sequence[LeaderboardRow]) -> dict[str, str]:
    """A letter for each warning on the page; the notes explain them."""
    return dict(
        zip(sorted({warning for row in rows for warning in row.warnings}), ascii_lowercase, strict=False)
    )


def _cells(
    row: LeaderboardRow, workload: str, hardware: str, figures: Sequence[str], letters: Mapping[str, str]
) -> tuple[str, ...]:
    megabytes = None if row.weight_bytes is None else row.weight_bytes * 1e-6
    return (
        str(row.rank),
        row.label,
        with_interval(row.value.model_dump()),
        workload,
        short(megabytes),
        *figures,
        {True: "yes", False: "no", None: MISSING}[row.pareto],
        hardware,
        " ".join(sorted(letters[warning] for warning in row.warnings)),
    )


def workload_text(workload: Document, model: str | None) -> str:
    """A workload on one line: `generate preset:gpt2 32+64 x1`, `matmul float32 1024`.

    An old document that lacks one of today's fields is shown by the fields that it has.
    """
    if workload.keys() >= {"prompt_tokens", "new_tokens", "batch_size"}:
        shape = "{prompt_tokens}+{new_tokens} x{batch_size}".format_map(workload)
        return f"{workload.get('kind')} {model} {shape}"
    shapes = (_shape(key, value) for key, value in workload.items() if key != "kind" and value is not None)
    return " ".join(part for part in (workload.get("kind"), model, *shapes) if part)


_SHAPES = {
    "batch_size": "x{}",
    "batch_sizes": "x{}",
    "new_tokens": "+{}",
    "image_size": "{} px",
    "heads": "{} heads",
    "kv_heads": "sharing {}",
    "head_size": "of {}",
    "rows": "{} rows",
}
"""How a field of a workload is written; other fields are written by their value alone."""


def _shape(key: str, value: object) -> str:
    """One field on a line: values joined by slashes, booleans by name."""
    values = value if isinstance(value, (list, tuple)) else [value]
    name = key.removesuffix("s")
    words = [str(each) if not isinstance(each, bool) else name if each else f"no {name}" for each in values]
    return _SHAPES.get(key, "{}").format("/".join(words))


def _notes(page: LeaderboardPage, letters: Mapping[str, str]) -> Iterator[str]:
    if not page.rows:
        yield "No valid results yet. Submit a job; its results appear here when it has ended."
        return
    yield f"{page.better.capitalize()} is better. ± is a 95% interval; rows whose intervals overlap share a rank."
    if any(row.top1_agreement is not None for row in page.rows):
        yield "quality: the share of positions at which the most likely token is the same as the fp32 model's."
    if any(row.pareto is not None for row in page.rows):
        yield "Pareto: no other row of the same workload and hardware is both faster and smaller."
    for warning, letter in letters.items():
        yield f"{letter}: {warning}: {WARNINGS.get(warning, warning)}."


CSV_FIELDS = (
    "rank", "label", "model", "workload", "techniques", "backend", "device", "hardware",
    "metric", "unit", "value", "ci_low", "ci_high", "replicates",
    "weight_bytes", "peak_bytes", "top1_agreement", "kld_mean", "j_per_token",
    "pareto", "warnings", "source", "measured_at",
    "result_id", "job_id", "workload_digest", "variant_digest",
)  # fmt: skip
"""The columns of the CSV form."""


def leaderboard_csv(page: LeaderboardPage) -> str:
    """The rows as raw values in SI units; empty where a value is missing."""
    return csv_text(CSV_FIELDS, [_record(row) for row in page.rows])


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
    }
