"""Many made-up results in a PostgreSQL database, seeded.

The service's own code stores the current result of each configuration (a variant on a class of hardware). The database
copies each of them into its earlier results, which have other ids and times and no document: the leaderboard and
histories do not read it. At the end the tables are vacuumed and analyzed, and a checkpoint writes what only the memory
has.

In every size a board has 25 rows of each class of hardware, and ten boards have one model. 2,000 configurations are ten
boards of 200 rows on 8 classes of hardware.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import combinations
from uuid import UUID

import psycopg
from sqlalchemy import inspect

from optigpu.documents.result import Environment, MetricSummary, Result, VariantSummary, Verdict
from optigpu.documents.views import Standing
from optigpu.store import results, standings
from optigpu.store.database import Database
from optigpu.store.tables import Base, EntryTechnique, LeaderboardEntry, MetricRow, ResultRow
from optigpu.vocabulary import METRICS, DeviceKind, Role

TECHNIQUES = (
    *("bf16", "fp16", "int8_weight_only", "int8_hybrid", "static_kv_cache", "torch_compile"),
    *("fused_attention", "native_decode"),
)
METRIC_NAMES = ("tokens_per_s", "ttft_s", "weight_bytes", "kld_mean", "top1_agreement")
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
FEWEST_BOARDS, ROWS_OF_BOARD, ROWS_OF_HARDWARE, BOARDS_OF_MODEL = 10, 1000, 25, 10
TOGETHER = 50
"""Results that one transaction stores."""
TABLES = (ResultRow, LeaderboardEntry, EntryTechnique, MetricRow)
"""Those in which an earlier result has rows."""
SETTINGS = (
    "session_replication_role=replica",
    "synchronous_commit=off",
    "maintenance_work_mem=1GB",
    "timezone=UTC",
)
TIME = '\'YYYY-MM-DD"T"HH24:MI:SS"Z"\''


@dataclass(frozen=True)
class Made:
    """What is made: the workload's digest and the model of each board, and the classes of hardware."""

    digests: tuple[str, ...]
    models: tuple[str, ...]
    hardware: tuple[str, ...]


def fill(url: str, configurations: int, count: int, seed: int = 0) -> Made:
    """Fills empty tables with `count` results, at least one for each configuration."""
    made, earlier = _made(configurations), count // configurations - 1
    database = Database(url)
    current = list(_current(made, configurations, earlier, seed))
    for begin in range(0, configurations, TOGETHER):
        with database.write() as session:
            for result in current[begin : begin + TOGETHER]:
                results.add(session, result, {})
                standings.enter(session, result)
    database.close()
    options = " ".join(f"-c {each}" for each in SETTINGS)
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True, options=options) as connection:
        indexes = list(_dropped(connection))
        for table in TABLES:
            _add_earlier(connection, table, earlier, configurations)
        connection.execute("UPDATE leaderboard SET earlier = %s WHERE standing = 'current'", (earlier,))
        for index in indexes:
            connection.execute(index)
        connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")
    return made


def _made(configurations: int) -> Made:
    boards = max(FEWEST_BOARDS, configurations // ROWS_OF_BOARD)
    classes = max(1, configurations // boards // ROWS_OF_HARDWARE)
    return Made(
        digests=tuple(_digest(f"workload {number}") for number in range(boards)),
        models=tuple(f"preset:made-up-{number // BOARDS_OF_MODEL:02d}" for number in range(boards)),
        hardware=tuple(f"1x Made-up CPU {number:02d}" for number in range(classes)),
    )


def _current(made: Made, configurations: int, round_: int, seed: int) -> Iterator[Result]:
    """The current result of each configuration, the boards in turn, with random hardware, stacks and figures."""
    drawn = random.Random(seed)
    stacks = [list(combinations(sorted(TECHNIQUES), size)) for size in range(5)]
    for number in range(configurations):
        board, stack = number % len(made.digests), drawn.choice(drawn.choice(stacks))
        speed = drawn.lognormvariate(3, 1)
        figures = (
            *(speed, 1 / speed, 1e9 * drawn.choice((0.25, 0.5, 1.0, 2.0)) * drawn.uniform(0.9, 1.1)),
            *(drawn.lognormvariate(-5, 2), drawn.uniform(0.8, 1)),
        )
        variant = VariantSummary(
            index=0,
            role=Role.SINGLE,
            label=" + ".join(stack) or "baseline",
            workload={"kind": "generate", "prompt_tokens": 16 + board, "new_tokens": 64, "batch_size": 1},
            model=made.models[board],
            backend="torch",
            device=DeviceKind.CPU,
            stack=tuple({"name": name} for name in stack),
            workload_digest=made.digests[board],
            variant_digest=_digest(f"{board} {stack} {number}"),
            primary_metric=METRIC_NAMES[0],
        )
        yield Result(
            id=str(UUID(int=(round_ << 96) | (7 << 76) | (2 << 62) | number)),
            created_at=BEGAN + timedelta(seconds=round_ * configurations + number),
            variant=variant,
            verdict=Verdict(valid=True),
            metrics={name: _summary(name, value) for name, value in zip(METRIC_NAMES, figures, strict=True)},
            environment=_environment(drawn.choice(made.hardware)),
            seed=0,
        )


def _environment(hardware: str) -> Environment:
    return Environment(
        hardware_class=hardware,
        host_id="made-up",
        cpu_model="Made-up CPU",
        cpu_cores=8,
        memory_bytes=2**34,
        os="Linux",
        software={"optigpu": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    )


def _summary(name: str, value: float) -> MetricSummary:
    unit, better, _ = METRICS[name]
    interval = 0.98 * value, 1.02 * value
    return MetricSummary(unit=unit, better=better, value=value, ci=interval, n=30, replicates=3)


def _dropped(connection: psycopg.Connection) -> Iterator[str]:
    """Drops the indexes but the keys: rows are indexed faster when all are there. The statements that make them
    again."""
    names = [table.__tablename__ for table in TABLES]
    indexes = connection.execute(
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = ANY(%s) AND indexname LIKE 'ix%%'",
        (names,),
    ).fetchall()
    for name, definition in indexes:
        connection.execute(f"DROP INDEX {name}")
        yield definition


def _add_earlier(connection: psycopg.Connection, table: type[Base], rounds: int, configurations: int) -> None:
    """Adds so many earlier results of each configuration, with the figures of its current one. Each round has its
    number as the first 8 digits of its ids."""
    columns = [column.key for column in inspect(table).columns]
    key, name = "id" if table is ResultRow else "result_id", table.__tablename__
    for round_ in range(rounds):
        seconds, id_ = (rounds - round_) * configurations, f"'{round_:08x}' || substr({key}, 9)"
        before = {at: f"{at} - interval '{seconds} seconds'" for at in ("created_at", "measured_at")}
        times = f"to_char(measured_at, {TIME})", f"to_char({before['measured_at']}, {TIME})"
        changed = {
            **before,
            key: id_,
            "document": "'{}'",
            "standing": f"'{Standing.EARLIER}'",
            "pareto": "NULL",
            "shown": f"replace(replace(shown, {key}, {id_}), {times[0]}, {times[1]})",
        }
        values = ", ".join(changed.get(column, column) for column in columns)
        connection.execute(
            f"INSERT INTO {name} ({', '.join(columns)}) SELECT {values} FROM {name} "
            f"WHERE {key} >= '{rounds:08x}' AND {key} < '{rounds + 1:08x}'"
        )


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
