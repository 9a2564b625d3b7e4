"""The rows of made-up results as lines for COPY.

The service's own code makes the rows of one result for each stack, whose values are marks; in a copy of its lines each
result's values take their place.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache

from pydantic_core import to_json
from sqlalchemy import inspect

from benchmarks.made_up import METRIC_NAMES, Configuration, environment, interval, workload
from optigpu.documents.result import Result
from optigpu.documents.views import Standing
from optigpu.job.spec import digest
from optigpu.store.entries import board_number, entry_of, metric_row, techniques_of
from optigpu.store.tables import Base, EntryTechnique, LeaderboardEntry, MetricRow, ResultRow

SOURCE = "worker"
TABLES = (ResultRow, LeaderboardEntry, EntryTechnique, MetricRow)
"""Those that a result has rows in, but for its samples."""
BOARD, MOMENT = 987_654_000, datetime(2222, 2, 2, 2, 2, 2, tzinfo=UTC)
VALUES = {name: 1000.5 + 10_000 * number for number, name in enumerate(METRIC_NAMES, 1)}
"""Marks that are numbers. Those that are text are the places themselves."""
MARKED = Configuration(
    number=0,
    board=BOARD,
    digest="%(digest)s",
    variant="%(variant)s",
    model="%(model)s",
    hardware="%(hardware)s",
    stack=(),
    figures=VALUES,
    pareto=False,
)
FIGURES = tuple(f"{name}_{part}" for name in METRIC_NAMES for part in ("value", "low", "high"))

Lines = Mapping[type[Base], str]
"""By table; each line ends with a line break."""


def columns_of(table: type[Base]) -> list[str]:
    """In the order of its lines."""
    return [column.key for column in inspect(table).columns]


def lines_of(each: Configuration, result_id: str, measured_at: datetime, earlier: int) -> Lines:
    """The rows of the current result of a place, which has replaced so many earlier ones."""
    values = {
        "id": result_id,
        "at": _moment(measured_at),
        "digest": each.digest,
        "board": board_number(each.digest, SOURCE),
        "prompt_tokens": workload(each.board)["prompt_tokens"],
        "variant": each.variant,
        "model": each.model,
        "hardware": each.hardware,
        "environment": environment_digest(each.hardware),
        "earlier": earlier,
        "pareto": _text(each.pareto),
        **dict(zip(FIGURES, _figures(each.figures), strict=True)),
    }
    return {table: lines % values for table, lines in _marked(each.stack).items()}


@cache
def environment_digest(hardware: str) -> str:
    return digest(environment(hardware).model_dump(mode="json"))


@cache
def _marked(stack: tuple[str, ...]) -> Lines:
    result = MARKED._replace(stack=stack).result("%(id)s", MOMENT)
    entry = _columns(entry_of(result)) | {
        "standing": _text(Standing.CURRENT),
        "earlier": "%(earlier)s",
        "pareto": "%(pareto)s",
    }
    metrics = [
        _columns(metric_row(result, name, metric)) | {"standing": _text(Standing.CURRENT)}
        for name, metric in result.metrics.items()
    ]
    techniques = (
        EntryTechnique(result_id=result.id, name=name, board=board_number(MARKED.digest, SOURCE))
        for name in techniques_of(result)
    )
    return {
        ResultRow: _lines(ResultRow, [_columns(_stored(result))]),
        LeaderboardEntry: _lines(LeaderboardEntry, [entry]),
        EntryTechnique: _lines(EntryTechnique, map(_columns, techniques)),
        MetricRow: _lines(MetricRow, metrics),
    }


def _stored(result: Result) -> ResultRow:
    """Without its document, which nothing that is measured reads."""
    return ResultRow(
        id=result.id,
        job_id=None,
        created_at=result.created_at,
        environment_digest="%(environment)s",
        document={},
    )


def _columns(row: Base) -> dict[str, str]:
    return {name: _text(getattr(row, name)) for name in columns_of(type(row))}


def _lines(table: type[Base], rows: Iterable[Mapping[str, str]]) -> str:
    text = "".join("\t".join(row[name] for name in columns_of(table)) + "\n" for row in rows)
    marks = {
        _moment(MOMENT): "%(at)s",
        str(board_number(MARKED.digest, SOURCE)): "%(board)s",
        str(workload(BOARD)["prompt_tokens"]): "%(prompt_tokens)s",
        **{mark: f"%({name})s" for name, mark in zip(FIGURES, _figures(VALUES), strict=True)},
    }
    for mark, place in marks.items():
        text = text.replace(mark, place)
    return text


def _figures(figures: Mapping[str, float]) -> list[str]:
    """Each figure and its interval as they are written in JSON."""
    numbers = [number for value in figures.values() for number in (value, *interval(value))]
    return to_json(numbers).decode()[1:-1].split(",")


def _text(value: object) -> str:
    """A value as COPY reads it."""
    match value:
        case None:
            return "\\N"
        case bool():
            return "t" if value else "f"
        case bytes():
            return f"\\\\x{value.hex()}"
        case datetime():
            return _moment(value)
        case StrEnum():
            return value.value
        case dict():
            return json.dumps(value)
        case float():
            return to_json(value).decode()
    return str(value)


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
