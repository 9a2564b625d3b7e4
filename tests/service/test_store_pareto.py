"""Pareto flags are kept as results come and go; what is kept is what a comparison of all rows would find."""

import random
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.result import Result
from optigpu.documents.views import Standing
from optigpu.store import results, standings
from optigpu.store.database import Database
from optigpu.store.standings import beats, costs_of
from optigpu.store.tables import LeaderboardEntry
from optigpu.vocabulary import new_id
from tests.service.records import a_metric, a_result

LATER = {"optigpu": "0.2.0", "torch": "2.14.0"}


def test_flags_are_those_of_a_comparison_of_all_rows_whatever_came_and_went(database: Database) -> None:
    random_ = random.Random(7)
    known: list[str] = []
    with database.write() as session:
        for step in range(60):
            if known and random_.random() < 0.3:
                standings.remove(session, [known.pop(random_.randrange(len(known)))])
            else:
                result = _made(random_)
                results.add(session, result, {})
                standings.enter(session, result)
                known.append(result.id)
            assert _kept(session) == _compared(session), f"after step {step}"
        assert set(_kept(session).values()) == {True, False, None}
        standings.remove(session, known)
        assert _kept(session) == {}


def test_a_result_of_unknown_quality_beats_none_that_has_one(database: Database) -> None:
    with database.write() as session:
        _enter(session, _figures(100.0, 1.0, None, None), "unmeasured")
        _enter(session, _figures(50.0, 2.0, 0.1, None), "measured")
        _enter(session, _figures(60.0, 2.0, 0.05, 3.0), "better")
        flags = {each.variant_digest: each.pareto for each in session.scalars(select(LeaderboardEntry))}
        by_label = [flags[_of(name).variant.variant_digest] for name in ("unmeasured", "measured", "better")]
    assert by_label == [True, False, True]


def _made(random_: random.Random) -> Result:
    """One of twenty configurations on two classes of hardware, so that places get several results."""
    figures = _figures(
        random_.choice((1.0, 2.0, 3.0)),
        random_.choice((1.0, 2.0, None)),
        random_.choice((0.1, 0.2, None)),
        random_.choice((5.0, None)),
    )
    return _of(
        f"t{random_.randrange(10)}",
        figures,
        hardware=random_.choice(("1x Test CPU", "2x Test CPU")),
        valid=random_.random() > 0.1,
        software=random_.choice((None, LATER)),
    )


def _of(name: str, metrics: dict[str, Any] | None = None, **changes: Any) -> Result:
    return a_result(metrics, stack=(name,), id=new_id(), **changes)


def _figures(speed: float, size: float | None, kld: float | None, joules: float | None) -> dict[str, Any]:
    values = {"tokens_per_s": speed, "weight_bytes": size, "kld_mean": kld, "j_per_token": joules}
    return {name: a_metric(name, value) for name, value in values.items()}


def _enter(session: Session, figures: dict[str, Any], name: str) -> None:
    result = _of(name, figures)
    results.add(session, result, {})
    standings.enter(session, result)


def _kept(session: Session) -> dict[str, bool | None]:
    session.expire_all()
    return {each.result_id: each.pareto for each in session.scalars(select(LeaderboardEntry))}


def _compared(session: Session) -> dict[str, bool | None]:
    entries = session.scalars(select(LeaderboardEntry)).all()
    current = [each for each in entries if each.standing is Standing.CURRENT]
    flags: dict[str, bool | None] = dict.fromkeys((each.result_id for each in entries), None)
    for each in current:
        costs = costs_of(each)
        if costs is None:
            continue
        others = [
            theirs
            for other in current
            if (other.board, other.hardware_class) == (each.board, each.hardware_class)
            and (theirs := costs_of(other)) is not None
        ]
        flags[each.result_id] = not any(beats(theirs, costs) for theirs in others)
    return flags
