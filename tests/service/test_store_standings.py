"""Which result of a variant on a class of hardware is the current one, and what becomes of the others."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import delete, func, select

from optigpu.documents.result import Result, VerdictWarning
from optigpu.store import entries
from optigpu.store.database import Database
from optigpu.store.tables import LeaderboardEntry, ResultRow
from tests.service.records import NOON, a_metric, a_result, enter, rows_of

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
    metrics = {"tokens_per_s": a_metric("tokens_per_s", value, (value, value))}
    return a_result(metrics, measured_at=NOON + timedelta(hours=hour), **changes)
