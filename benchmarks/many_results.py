"""Many made-up results in a PostgreSQL database, as the service would have stored them: seeded, and without documents.

Processes copy the current results in, the database makes the earlier ones of them, and indexes are built when all rows
are there. The service's own code makes the rows of one result for each stack, whose values are marks; in a copy of its
lines each result's values take their place. Documents and raw samples are left empty: neither the leaderboard nor
histories read them. What is measured is not a database that has just been filled, so at the end its tables are vacuumed
and analyzed, and a checkpoint writes what only the memory has.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, partial
from uuid import UUID

import psycopg
from pydantic_core import to_json
from sqlalchemy import inspect

from benchmarks.made_up import (
    METRIC_NAMES,
    Configuration,
    Drawn,
    Made,
    draw,
    environment,
    interval,
    measured_at,
    result_id,
    workload,
)
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


AT_ONCE = 20_000
"""Configurations that are copied together."""
SIDE_BY_SIDE = 2
LANES = (("metrics",), ("results", "leaderboard", "entry_techniques"))
"""The tables that grow, by the connection that makes earlier results, builds indexes and vacuums there."""
OTHERS = ("boards", "known_names", "environments", "revisions")
KEYS = {"results": "id"}
"""The column that has the result's id, where it is not `result_id`."""
TIME = '\'YYYY-MM-DD"T"HH24:MI:SS"Z"\''
SETTINGS = (
    *("session_replication_role=replica", "synchronous_commit=off"),
    *("maintenance_work_mem=1GB", "timezone=UTC"),
)
Session = psycopg.Connection


def fill(url: str, configurations: int, results: int, seed: int = 0) -> Made:
    """Fills empty tables. `results` counts earlier ones as well, at least one for each configuration."""
    drawn, earlier = draw(configurations, seed), results // configurations - 1
    starting = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(SIDE_BY_SIDE, starting) as processes,
        ThreadPoolExecutor(SIDE_BY_SIDE) as threads,
    ):
        with _session(url) as session:
            _boards(session, drawn, earlier)
            _names(session, drawn)
        with _without_indexes(url, threads):
            parts = (drawn.part(begin, AT_ONCE) for begin in range(0, configurations, AT_ONCE))
            _all(processes, (partial(_copy, url, part, earlier, configurations) for part in parts))
            _all(threads, (partial(_earlier, url, tables, earlier, configurations) for tables in LANES))
        _all(threads, (partial(_settle, url, tables) for tables in (*LANES, OTHERS)))
    with _session(url) as session:
        session.execute("CHECKPOINT")
    return drawn.made


@contextmanager
def _session(url: str) -> Iterator[Session]:
    """Each statement is a transaction, references are not checked, and no commit waits for the disk."""
    with psycopg.connect(
        url, autocommit=True, options=" ".join(f"-c {each}" for each in SETTINGS)
    ) as session:
        yield session


def _all(executor: Executor, work: Iterable[Callable[[], None]]) -> None:
    for each in [executor.submit(one) for one in work]:
        each.result()


@contextmanager
def _without_indexes(url: str, threads: Executor) -> Iterator[None]:
    """Rows that are written in the block are indexed at its end, but for keys that other tables refer to."""
    with _session(url) as session:
        dropped = {tables: list(_dropped(session, tables)) for tables in LANES}
    yield
    _all(threads, (partial(_run, url, statements) for statements in dropped.values()))


def _dropped(session: Session, tables: tuple[str, ...]) -> Iterator[str]:
    """The statements that make again what is dropped."""
    indexes = session.execute(
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = ANY(%s) AND indexname LIKE 'ix%%'",
        (list(tables),),
    ).fetchall()
    for name, definition in indexes:
        session.execute(f"DROP INDEX {name}")
        yield definition
    keys = session.execute(
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint AS key "
        "WHERE contype = 'p' AND conrelid::regclass::text = ANY(%s) AND NOT EXISTS (SELECT FROM pg_constraint "
        "WHERE contype = 'f' AND confrelid = key.conrelid)",
        (list(tables),),
    ).fetchall()
    for table, name, definition in keys:
        session.execute(f"ALTER TABLE {table} DROP CONSTRAINT {name}")
        yield f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition}"


def _run(url: str, statements: Iterable[str]) -> None:
    with _session(url) as session:
        for statement in statements:
            session.execute(statement)


def _boards(session: Session, drawn: Drawn, earlier: int) -> None:
    """The newest result of a board is the current one of its last configuration."""
    made, count = drawn.made, len(drawn)
    boards = range(min(len(made.digests), count))
    newest = (count - 1 - (count - 1 - board) % len(made.digests) for board in boards)
    with session.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO boards (number, workload_digest, source, workload, model, primary_metric, document, newest, "
            "invalid) VALUES (%s, %s, %s, 'generate', %s, %s, %s, %s, '{}')",
            [
                (
                    *(board_number(made.digests[board], SOURCE), made.digests[board], SOURCE),
                    *(made.models[board], METRIC_NAMES[0]),
                    *(json.dumps(workload(board)), result_id(earlier, number)),
                )
                for board, number in zip(boards, newest, strict=True)
            ],
        )
        hardware = [made.hardware[number] for number in sorted(set(drawn.hardware.tolist()))]
        cursor.executemany(
            "INSERT INTO environments (digest, document) VALUES (%s, %s)",
            [
                (environment_digest(name), json.dumps(environment(name).model_dump(mode="json")))
                for name in hardware
            ],
        )
    session.execute("INSERT INTO revisions (part, revision) VALUES ('leaderboard', %s)", (str(UUID(int=1)),))


def _names(session: Session, drawn: Drawn) -> None:
    made = drawn.made
    names = {
        "backend": {"torch"},
        "hardware": {made.hardware[number] for number in drawn.hardware.tolist()},
        "model": set(made.models[: len(drawn)]),
        "source": {SOURCE},
        "technique": {name for stack in drawn.stacks for name in stack},
        "workload": {"generate"},
    }
    with session.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO known_names (filter, name) VALUES (%s, %s)",
            [(kind, name) for kind, found in names.items() for name in sorted(found)],
        )


def _copy(url: str, part: Drawn, earlier: int, configurations: int) -> None:
    """The current results of some configurations."""
    lines = [
        lines_of(
            each,
            result_id(earlier, each.number),
            measured_at(earlier, each.number, configurations),
            earlier,
        )
        for each in part
    ]
    with _session(url) as session, session.cursor() as cursor:
        for table in TABLES:
            columns = ", ".join(columns_of(table))
            with cursor.copy(f"COPY {table.__tablename__} ({columns}) FROM STDIN") as copy:
                copy.write("".join(each[table] for each in lines))


def _earlier(url: str, tables: tuple[str, ...], times: int, configurations: int) -> None:
    """So many earlier results of each configuration, with the figures of its current one."""
    of_table = {table.__tablename__: columns_of(table) for table in TABLES}
    with _session(url) as session:
        for table in tables:
            # Rows that are added are behind those that they are made of.
            blocks = session.execute(f"SELECT pg_relation_size('{table}') / 8192").fetchone()
            assert blocks is not None
            key, columns = KEYS.get(table, "result_id"), of_table[table]
            here = f"left({key}, 8) = '{times:08x}' AND ctid < '({blocks[0]},0)'"
            for round_ in range(times):
                changed = _changed(key, round_, (times - round_) * configurations)
                values = ", ".join(changed.get(name, name) for name in columns)
                session.execute(
                    f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} WHERE {here}"
                )


def _changed(key: str, round_: int, seconds: int) -> dict[str, str]:
    """What an earlier result has in the place of the current one's values, by column."""
    id_ = f"'{round_:08x}' || substr({key}, 9)"

    def before(column: str) -> str:
        return f"{column} - interval '{seconds} seconds'"

    at = f"to_char(measured_at, {TIME})", f"to_char({before('measured_at')}, {TIME})"
    return {
        key: id_,
        "standing": f"'{Standing.EARLIER}'",
        "earlier": "0",
        "pareto": "NULL",
        "created_at": before("created_at"),
        "measured_at": before("measured_at"),
        "shown": f"replace(replace(shown, {key}, {id_}), {at[0]}, {at[1]})",
    }


def _settle(url: str, tables: tuple[str, ...]) -> None:
    _run(url, [f"VACUUM (ANALYZE) {', '.join(tables)}"])
