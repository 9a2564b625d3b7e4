"""Many made-up results in a PostgreSQL database, as the service would have stored them: seeded, and without documents.

Configurations (a variant on a class of hardware) are copied in; their earlier results are made of the current ones by
the database, and indexes when all rows are there. Documents and raw samples are left empty: neither the leaderboard nor
histories read them.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from hashlib import sha256
from itertools import islice
from uuid import UUID

import psycopg

from optigpu.documents.views import RowFacts
from optigpu.store.entries import age, board_number, stack_text
from optigpu.vocabulary import METRICS, Better, DeviceKind

VERSIONS = {"optigpu": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}
TECHNIQUES = (
    *("bf16", "fp16", "int8_weight_only", "int8_hybrid", "static_kv_cache", "torch_compile"),
    *("fused_attention", "native_decode"),
)
HARDWARE = tuple(f"1x Made-up GPU {number:02d}" for number in range(40))
METRIC_NAMES = ("tokens_per_s", "ttft_s", "weight_bytes", "kld_mean", "top1_agreement")
AGE = age("torch", VERSIONS)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ROWS_OF_BOARD = 1000
"""Of a large board; there are ten boards at least."""


RESULT = "id, job_id, created_at, environment_digest, document"
ENTRY = (
    "result_id, board, variant_digest, hardware_class, source, standing, superseded, earlier, measured_at, workload, "
    "model, backend, device, replicates, warnings, reasons, age, score, size_bytes, kld, top1, energy_j, pareto, "
    "shown, edge"
)
TECHNIQUE = "result_id, name, board"
METRIC = (
    "result_id, name, value, low, high, summary, board, standing, unsure, place, hardware_class, backend, stack, top1, "
    "kld, clean"
)
"""The columns of the tables that grow, in the order in which rows are written."""
GROWING = ("results", "leaderboard", "entry_techniques", "metrics")
AT_ONCE = 20_000
"""Configurations that are copied together."""


@dataclass(frozen=True)
class Made:
    """What was made, for requests to ask for."""

    digests: tuple[str, ...]
    models: tuple[str, ...]


@dataclass(frozen=True)
class Configuration:
    """One row of a board."""

    number: int
    board: int
    digest: str
    model: str
    hardware: str
    stack: tuple[str, ...]
    figures: dict[str, float]

    @cached_property
    def id(self) -> str:
        return str(UUID(int=(7 << 76) | (2 << 62) | self.number))

    @cached_property
    def board_number(self) -> int:
        return board_number(self.digest, "worker")

    @property
    def variant(self) -> str:
        return _digest(f"{self.digest} {self.stack} {self.number}")


def fill(url: str, configurations: int, results: int, seed: int = 0) -> Made:
    """Fills empty tables. `results` counts earlier ones as well, at least one for each configuration."""
    boards = max(10, configurations // ROWS_OF_BOARD)
    made = Made(
        digests=tuple(_digest(f"workload {number}") for number in range(boards)),
        models=tuple(f"preset:made-up-{number % 20:02d}" for number in range(boards)),
    )
    with psycopg.connect(url) as connection:
        _boards(connection, made)
        with _without_indexes(connection):
            configurations_ = _configurations(made, configurations, seed)
            while batch := list(islice(configurations_, AT_ONCE)):
                _copy(connection, batch)
            _earlier(connection, results // configurations - 1)
        connection.execute(
            "UPDATE boards SET newest = found.newest FROM (SELECT board, max(result_id) AS newest FROM leaderboard "
            "GROUP BY board) AS found WHERE found.board = boards.number"
        )
        connection.commit()
        connection.autocommit = True
        connection.execute("VACUUM ANALYZE")
    return made


@contextmanager
def _without_indexes(connection: psycopg.Connection) -> Iterator[None]:
    """Rows that are written in the block are indexed together at its end, and their references are not checked."""
    found = connection.execute(
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = ANY(%s) AND indexname LIKE 'ix%%'",
        (list(GROWING),),
    ).fetchall()
    connection.execute("SET session_replication_role = replica")
    connection.execute("SET maintenance_work_mem = '512MB'")
    for name, _ in found:
        connection.execute(f"DROP INDEX {name}")
    yield
    for _, definition in found:
        connection.execute(definition)
    connection.execute("SET session_replication_role = origin")


def _configurations(made: Made, count: int, seed: int) -> Iterator[Configuration]:
    random_ = random.Random(seed)
    for number in range(count):
        board = number % len(made.digests)
        stack = tuple(sorted(random_.sample(TECHNIQUES, random_.randint(0, 4))))
        speed = random_.lognormvariate(3, 1)
        yield Configuration(
            number=number,
            board=board,
            digest=made.digests[board],
            model=made.models[board],
            hardware=random_.choice(HARDWARE),
            stack=stack,
            figures={
                "tokens_per_s": speed,
                "ttft_s": 1 / speed,
                "weight_bytes": random_.choice((0.25, 0.5, 1.0, 2.0)) * 1e9 * random_.uniform(0.9, 1.1),
                "kld_mean": random_.lognormvariate(-5, 2),
                "top1_agreement": random_.uniform(0.8, 1.0),
            },
        )


def _boards(connection: psycopg.Connection, made: Made) -> None:
    newest = str(UUID(int=(7 << 76) | (2 << 62)))
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO boards (number, workload_digest, source, workload, model, primary_metric, document, newest, "
            "invalid) VALUES (%s, %s, 'worker', 'generate', %s, 'tokens_per_s', %s, %s, '{}')",
            [
                (board_number(digest, "worker"), digest, model, json.dumps(_workload(number)), newest)
                for number, (digest, model) in enumerate(zip(made.digests, made.models, strict=True))
            ],
        )
        names = [
            *(("hardware", name) for name in HARDWARE),
            *(("technique", name) for name in TECHNIQUES),
            *(("model", name) for name in sorted(set(made.models))),
            *(("backend", "torch"), ("source", "worker"), ("workload", "generate")),
        ]
        cursor.executemany("INSERT INTO known_names (filter, name) VALUES (%s, %s)", names)
        cursor.execute(
            "INSERT INTO environments (digest, document) VALUES (%s, '{}')", (_digest("environment"),)
        )
    connection.execute(
        "INSERT INTO revisions (part, revision) VALUES ('leaderboard', %s)", (str(UUID(int=1)),)
    )


def _copy(connection: psycopg.Connection, made: list[Configuration]) -> None:
    environment = _digest("environment")
    rows: dict[str, Iterator[tuple[object, ...]]] = {
        f"results ({RESULT})": ((each.id, None, BEGAN, environment, "{}") for each in made),
        f"leaderboard ({ENTRY})": map(_entry, made),
        f"entry_techniques ({TECHNIQUE})": (
            (each.id, name, each.board_number) for each in made for name in each.stack
        ),
        f"metrics ({METRIC})": (_metric(each, name) for each in made for name in METRIC_NAMES),
    }
    with connection.cursor() as cursor:
        for table, lines in rows.items():
            with cursor.copy(f"COPY {table} FROM STDIN") as copy:
                for line in lines:
                    copy.write_row(line)


def _entry(each: Configuration) -> tuple[object, ...]:
    facts = RowFacts(
        result_id=each.id,
        job_id=None,
        source="worker",
        measured_at=BEGAN + timedelta(seconds=each.number),
        workload=_workload(each.board),
        workload_digest=each.digest,
        variant_digest=each.variant,
        model=each.model,
        label=" + ".join(each.stack) or "baseline",
        techniques=each.stack,
        backend="torch",
        device=DeviceKind.CUDA,
        hardware=each.hardware,
        versions=VERSIONS,
        weight_bytes=each.figures["weight_bytes"],
        peak_bytes=each.figures["weight_bytes"],
        top1_agreement=each.figures["top1_agreement"],
        kld_mean=each.figures["kld_mean"],
    )
    return (
        *(
            each.id,
            each.board_number,
            each.variant,
            each.hardware,
            "worker",
            "current",
            False,
        ),
        *(0, facts.measured_at, "generate", each.model, "torch", "cuda", 3, "", "", AGE),
        *(each.figures["tokens_per_s"], each.figures["weight_bytes"], each.figures["kld_mean"]),
        *(each.figures["top1_agreement"], None, each.number % 100 == 0, facts.model_dump_json(), None),
    )


def _metric(each: Configuration, name: str) -> tuple[object, ...]:
    value = each.figures[name]
    better = METRICS[name].better
    low, high = 0.98 * value, 1.02 * value
    summary = (
        f'{{"unit":"{METRICS[name].unit}","value":{value},"ci":[{low},{high}],"n":30,"replicates":3,'
        f'"better":"{better}"}}'
    )
    place = -value if better is Better.HIGHER else value
    return (
        *(each.id, name, value, low, high, summary, each.board_number, "current", False, place),
        *(each.hardware, "torch", stack_text(each.stack)),
        *(each.figures["top1_agreement"], each.figures["kld_mean"], True),
    )


def _earlier(connection: psycopg.Connection, times: int) -> None:
    """So many earlier results of each configuration, made of its current one."""
    for number in range(1, times + 1):
        for table, columns, key in (
            ("results", RESULT, "id"),
            ("leaderboard", ENTRY, "result_id"),
            ("metrics", METRIC, "result_id"),
        ):
            changed = {
                key: f"'{number:08x}' || substr({key}, 9)",
                "standing": "'earlier'",
                "pareto": "NULL",
                "measured_at": f"measured_at - interval '{number} days'",
            }
            values = ", ".join(changed.get(name, name) for name in columns.split(", "))
            current = f"substr({key}, 1, 8) = '00000000'"
            connection.execute(
                f"INSERT INTO {table} ({columns}) SELECT {values} FROM {table} WHERE {current}"
            )
    connection.execute("UPDATE leaderboard SET earlier = %s WHERE standing = 'current'", (times,))


def _workload(number: int) -> dict[str, object]:
    return {"kind": "generate", "prompt_tokens": 16 + number, "new_tokens": 64, "batch_size": 1}


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
