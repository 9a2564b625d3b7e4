"""Boards and their rows, best first, filtered; ranks, which overlapping intervals share; and which result of a variant
on a class of hardware is the current one, and what becomes of the others."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.result import Result, VerdictWarning
from optigpu.documents.views import LeaderboardRow
from optigpu.store import entries, leaderboard, workers
from optigpu.store.database import Database
from optigpu.store.tables import LeaderboardEntry, MetricRow, ResultRow
from optigpu.vocabulary import DeviceKind
from tests.service.records import NOON, a_metric, a_result, a_speed, a_worker, board_of, enter, rows_of


def test_a_row_says_what_was_measured_where(database: Database) -> None:
    metrics = {
        "tokens_per_s": a_metric("tokens_per_s", 100.0, (99.0, 101.0)),
        "weight_bytes": a_metric("weight_bytes", 5e8),
        "peak_bytes": a_metric("peak_bytes", None),
        "top1_agreement": a_metric("top1_agreement", 0.98),
        "kld_mean": a_metric("kld_mean", 0.01),
        "j_per_token": a_metric("j_per_token", 0.2),
    }
    result = a_result(metrics, stack=("bf16", "int8_weight_only"))
    with database.write() as session:
        enter(session, result)
        board = board_of(session)
    assert (board.metric, board.unit, board.better, board.next_cursor) == (
        "tokens_per_s",
        "1/s",
        "higher",
        None,
    )
    assert (board.workload, board.model, board.row_count) == (
        {"kind": "generate", "size": 1},
        "preset:gpt2",
        1,
    )
    assert board.rows == (
        LeaderboardRow(
            rank=1,
            result_id=result.id,
            job_id=None,
            source="worker",
            measured_at=NOON,
            workload={"kind": "generate", "size": 1},
            workload_digest=result.variant.workload_digest,
            variant_digest=result.variant.variant_digest,
            model="preset:gpt2",
            label="bf16 + int8_weight_only",
            techniques=("bf16", "int8_weight_only"),
            backend="torch",
            device=DeviceKind.CPU,
            hardware="1x Test CPU",
            versions={"torch": "2.13.0"},
            metric="tokens_per_s",
            value=metrics["tokens_per_s"],
            weight_bytes=5e8,
            peak_bytes=None,
            top1_agreement=0.98,
            kld_mean=0.01,
            j_per_token=0.2,
            pareto=True,
            warnings=("single_replicate",),
        ),
    )


def test_a_row_of_before_there_were_such_fields_is_listed_without_them(database: Database) -> None:
    """Rows are kept as they were written; a later version may show more of those that it writes."""
    with database.write() as session:
        enter(session, a_speed(100.0))
        entry, figure = (
            session.scalars(select(LeaderboardEntry)).one(),
            session.scalars(select(MetricRow)).one(),
        )
        later = ("top1_agreement", "kld_mean", "j_per_token")
        entry.shown = {name: value for name, value in entry.shown.items() if name not in later}
        figure.summary = {"unit": "1/s", "value": 100.0, "n": 3, "replicates": 1, "better": "higher"}
        session.flush()
        (row,) = rows_of(session)
    assert (row.value.value, row.value.per_replicate) == (100.0, ())
    assert (row.top1_agreement, row.kld_mean, row.j_per_token) == (None, None, None)


def test_pareto_rows_are_those_that_no_other_beats_in_speed_and_bytes(database: Database) -> None:
    shapes = {"fast": (100.0, 9.0), "small": (10.0, 1.0), "between": (50.0, 5.0), "beaten": (40.0, 6.0)}
    shapes |= {"as fast, larger": (100.0, 10.0), "twin of small": (10.0, 1.0)}
    with database.write() as session:
        for name, (speed, size) in shapes.items():
            enter(session, _sized(speed, size, stack=(name,)))
        enter(session, _sized(1000.0, 0.1, size=2))
        enter(session, _sized(1000.0, 0.1, hardware="2x Test CPU"))
        enter(session, _sized(1000.0, None, stack=("unknown",)))
        rows = rows_of(session, hardware="1x", limit=50)
    flags = {row.label: row.pareto for row in rows if row.workload["size"] == 1}
    yes = {"fast", "small", "between", "twin of small"}
    assert flags == {name: name in yes for name in shapes} | {"unknown": None}


def test_the_pareto_flag_weighs_peak_bytes_on_an_accelerator(database: Database) -> None:
    with database.write() as session:
        for name, peak in (("lean", 1.0), ("fat", 2.0)):
            metrics = {
                "tokens_per_s": a_metric("tokens_per_s", 10.0),
                "weight_bytes": a_metric("weight_bytes", 1.0),
                "peak_bytes": a_metric("peak_bytes", peak),
            }
            enter(session, a_result(metrics, stack=(name,), device=DeviceKind.CUDA))
        rows = rows_of(session)
    assert {row.label: row.pareto for row in rows} == {"lean": True, "fat": False}


@pytest.mark.parametrize(
    ("filters", "labels"),
    [
        ({}, {"bf16", "bf16 + int8_weight_only", "baseline"}),
        ({"technique": "int8"}, set()),
        ({"technique": "b%"}, set()),
        ({"hardware": "_x test cpu"}, set()),
        ({"model": "preset:gpt"}, set()),
        ({"source": "device"}, {"agent"}),
    ],
)
def test_no_part_and_no_wildcard_of_a_name_is_found(
    database: Database, filters: dict[str, Any], labels: set[str]
) -> None:
    with database.write() as session:
        enter(session, a_speed(1.0))
        enter(session, a_speed(2.0, stack=("bf16",), hardware="1x NVIDIA H200"))
        enter(session, a_speed(3.0, stack=("bf16", "int8_weight_only")))
        enter(session, a_speed(4.0, stack=("agent",), source="device"))
        rows = rows_of(session, **filters)
    assert {row.label for row in rows} == labels


def test_rows_of_some_classes_of_hardware_are_in_one_order(database: Database) -> None:
    with database.write() as session:
        for number in range(12):
            hardware = ("1x Left CPU", "1x Right CPU", "1x GPU")[number % 3]
            enter(session, a_speed(float(number), stack=(f"t{number}",), hardware=hardware))
        found, cursor = [], None
        for _ in range(4):
            board = board_of(session, hardware="cpu", metric="tokens_per_s", limit=2, cursor=cursor)
            cursor = board.next_cursor
            found += [row.value.value for row in board.rows]
            assert board.row_count == 8
        assert cursor is None
    assert found == [10.0, 9.0, 7.0, 6.0, 4.0, 3.0, 1.0, 0.0]


def test_hardware_classes_are_those_that_serve_and_those_that_are_ranked(database: Database) -> None:
    with database.write() as session:
        enter(session, a_speed(1.0, hardware="b"))
        workers.register(session, a_worker(hardware_class="a"))
        workers.register(session, a_worker("worker-2", hardware_class="b"))
        assert workers.hardware_classes(session) == ["a", "b"]


def _sized(speed: float, weight_bytes: float | None, **changes: Any) -> Result:
    metrics = {
        "tokens_per_s": a_metric("tokens_per_s", speed),
        "weight_bytes": a_metric("weight_bytes", weight_bytes),
    }
    return a_result(metrics, **changes)


INTERVALS = [
    (100.0, 96.0, 104.0, 1),  # the yardstick of rank 1
    (98.0, 95.0, 101.0, 1),
    (97.0, 90.0, 99.0, 1),
    (92.0, 91.0, 95.5, 4),  # overlaps the row before it, but not the yardstick
    (90.0, 85.0, 91.0, 4),  # touches the yardstick of rank 4
    (80.0, 80.0, 80.0, 6),
    (80.0, 80.0, 80.0, 6),
    (79.0, 78.0, 79.5, 8),
]


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_ranks_are_shared_by_overlap_with_the_first_and_the_same_on_every_page(
    database: Database, limit: int
) -> None:
    with database.write() as session:
        for number, (value, low, high, _) in reversed(list(enumerate(INTERVALS))):
            enter(session, a_speed(value, (low, high), stack=(f"t{number}",)))
    with database.read() as session:
        ranked = _ranked(session, "tokens_per_s", limit)
    assert ranked == [(value, rank) for value, _, _, rank in INTERVALS]


def test_ranks_go_by_overlap_where_lower_is_better_too(database: Database) -> None:
    with database.write() as session:
        for name, value, low, high in (("a", 1.0, 0.9, 1.2), ("b", 1.1, 1.0, 1.3), ("c", 1.25, 1.21, 1.3)):
            metrics = {"ttft_s": a_metric("ttft_s", value, (low, high))}
            enter(session, a_result(metrics, stack=(name,)))
        (board,) = leaderboard.query(session, LeaderboardQuery(metric="ttft_s")).boards
    assert [(row.label, row.rank) for row in board.rows] == [("a", 1), ("b", 1), ("c", 3)]


UNSURE = [
    (100.0, (99.0, 101.0), 1),
    (50.0, (49.0, 51.0), 2),
    (110.0, None, 3),  # a higher value, but nothing says how exact it is
    (100.0, None, 3),
    (40.0, None, 3),
]


@pytest.mark.parametrize(("metric", "limit"), [("tokens_per_s", 1), ("tokens_per_s", 3), ("ttft_s", 50)])
def test_rows_without_an_interval_follow_those_with_one_and_share_a_rank(
    database: Database, metric: str, limit: int
) -> None:
    sign = 1 if metric == "tokens_per_s" else -1
    board = [
        (sign * value, ci and (min(sign * ci[0], sign * ci[1]), max(sign * ci[0], sign * ci[1])), rank)
        for value, ci, rank in UNSURE
    ]
    with database.write() as session:
        for number, (value, ci, _) in reversed(list(enumerate(board))):
            enter(session, a_result({metric: a_metric(metric, value, ci)}, stack=(f"t{number}",)))
        assert _ranked(session, metric, limit) == [(value, rank) for value, _, rank in board]


def test_rows_without_an_interval_share_the_first_rank_where_no_row_has_one(database: Database) -> None:
    with database.write() as session:
        for value in (3.0, 2.0, 1.0):
            enter(session, a_speed(value, None, stack=(f"{value}",)))
        assert _ranked(session, "tokens_per_s", 2) == [(3.0, 1), (2.0, 1), (1.0, 1)]


def test_what_is_counted_is_exact_without_an_interval(database: Database) -> None:
    metric = "weight_bytes"
    with database.write() as session:
        for name, size in (("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 3.0)):
            enter(session, a_result({metric: a_metric(metric, size)}, stack=(name,)))
        assert _ranked(session, metric, 50) == [(1.0, 1), (2.0, 2), (2.0, 2), (3.0, 4)]


def _ranked(session: Session, metric: str, limit: int) -> list[tuple[float | None, int | None]]:
    """The value and rank of every row, page by page."""
    rows: list[LeaderboardRow] = []
    cursor: str | None = None
    while not rows or cursor:
        (board,) = leaderboard.query(
            session, LeaderboardQuery(metric=metric, limit=limit, cursor=cursor)
        ).boards
        rows += board.rows
        cursor = board.next_cursor
    assert len({row.result_id for row in rows}) == len(rows)
    return [(row.value.value, row.rank) for row in rows]


OLD = {"optigpu": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.17.0"}
NEW = OLD | {"torch": "2.14.0+cpu"}
CAREFUL: dict[str, Any] = {"warnings": (), "replicates": 5}
CARELESS: dict[str, Any] = {
    "warnings": (VerdictWarning.SINGLE_REPLICATE, VerdictWarning.FEW_SAMPLES),
    "replicates": 1,
}


BETTER_FIRST = [
    # later versions, then no warning, then more processes, then newer
    {"hour": 1, "software": NEW, **CARELESS},
    {"hour": 0, "software": NEW, **CARELESS},
    {"hour": 2, "software": OLD, "warnings": (), "replicates": 5},
    {"hour": 1, "software": OLD, "warnings": (), "replicates": 5},
    {"hour": 3, "software": OLD, "warnings": (), "replicates": 3},
    {"hour": 4, "software": OLD, "warnings": (VerdictWarning.NOT_CONVERGED,), "replicates": 9},
    {"hour": 5, "software": OLD, **CARELESS},
]


@pytest.mark.parametrize("better", range(len(BETTER_FIRST) - 1))
def test_the_best_supported_of_the_latest_versions_is_current_whichever_came_first(
    sqlite_database: Database, better: int
) -> None:
    made = [
        _speed(float(number), **changes) for number, changes in enumerate(BETTER_FIRST[better : better + 2])
    ]
    for order in permutations(made):
        with sqlite_database.write() as session:
            session.execute(delete(LeaderboardEntry))
            session.execute(delete(ResultRow))
            for result in order:
                enter(session, result)
            (row,) = rows_of(session)
            assert row.result_id == made[0].id


def test_an_invalid_result_leaves_the_valid_one_in_its_place(database: Database) -> None:
    with database.write() as session:
        enter(session, _speed(200.0))
        enter(session, _speed(900.0, 1, valid=False))
        (row,) = rows_of(session)
        assert (row.value.value, row.earlier) == (200.0, 0)


def test_packages_that_are_not_compared_and_builds_of_one_version_change_nothing(database: Database) -> None:
    with database.write() as session:
        enter(session, _speed(100.0, software=OLD, **CAREFUL))
        enter(
            session, _speed(200.0, 1, software=OLD | {"torch": "2.13.0+cu130", "triton": "9.0"}, **CARELESS)
        )
        (row,) = rows_of(session)
    assert row.value.value == 100.0
    assert row.versions == OLD


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("2.9.1", "2.10.0"), ("2.13.0+cpu", "2.13.1"), ("2.13", "2.13.1"), ("unknown", "0.1"), ("1.99.99", "2")],
)
def test_versions_are_compared_as_numbers(earlier: str, later: str) -> None:
    assert entries.age("torch", {"torch": earlier}) < entries.age("torch", {"torch": later})


def test_a_row_is_superseded_when_its_variant_was_measured_with_later_versions_elsewhere(
    database: Database,
) -> None:
    with database.write() as session:
        enter(session, _speed(10.0, hardware="old", software=OLD))
        enter(session, _speed(8.0, hardware="old", software=OLD, stack=("bf16",)))
        enter(session, _speed(20.0, hardware="new", software=NEW))
        assert {(row.hardware, row.label): row.superseded for row in rows_of(session)} == {
            ("new", "baseline"): False,
            ("old", "baseline"): True,
            ("old", "bf16"): False,
        }
        enter(session, _speed(11.0, 1, hardware="old", software=NEW))
        assert not any(row.superseded for row in rows_of(session))


def test_hardware_and_sources_have_places_of_their_own(database: Database) -> None:
    with database.write() as session:
        enter(session, _speed(1.0))
        enter(session, _speed(2.0, hardware="1x Test GPU"))
        enter(session, _speed(3.0, source="device"))
        assert {row.value.value for row in rows_of(session)} == {1.0, 2.0}
        assert {row.value.value for row in rows_of(session, source="device")} == {3.0}


def test_results_that_arrive_together_leave_one_current(postgresql_database: Database) -> None:
    with postgresql_database.write() as session:
        session.execute(delete(LeaderboardEntry))
    made = [_speed(float(number)) for number in range(8)]

    def save(result: Result) -> None:
        with postgresql_database.write() as session:
            enter(session, result)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, made))
    with postgresql_database.read() as session:
        standing = LeaderboardEntry.standing
        found = dict(session.execute(select(standing, func.count()).group_by(standing)).all())
    assert found == {"current": 1, "earlier": 7}


def _speed(value: float, hour: int = 0, **changes: Any) -> Result:
    return a_speed(value, (value, value), measured_at=NOON + timedelta(hours=hour), **changes)
