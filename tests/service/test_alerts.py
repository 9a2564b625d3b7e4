"""Alert rules: fired by the transaction that enters a result, once for each crossing, and told to who asks."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.administration import AlertKind, AlertRequest, AlertView, WebhookEvent
from optigpu.documents.result import Result
from optigpu.store import alerts, outbox, results, standings, webhooks
from optigpu.store.database import Database
from optigpu.vocabulary import ConflictError, NotFoundError, new_id
from tests.service.processes import eventually
from tests.service.receiver import receiving
from tests.service.records import NOON, a_metric, a_result
from tests.service.serving import Served, serving

Speeds = Callable[..., list[dict[str, Any]]]
"""Enters results of these speeds at one place, one after the other, and returns the alerts that fired."""


def a_speed(value: float, hour: int = 0, **changes: Any) -> Result:
    """A careful result at one place of the leaderboard."""
    metric = a_metric("tokens_per_s", value, (0.99 * value, 1.01 * value))
    careful: dict[str, Any] = {"warnings": (), "replicates": 5}
    return a_result({"tokens_per_s": metric}, measured_at=NOON + timedelta(hours=hour), **careful | changes)


def enter(database: Database, *made: Result) -> None:
    for result in made:
        with database.write() as session:
            results.add(session, result, {})
            standings.enter(session, result)


@pytest.fixture
def first(database: Database) -> Result:
    """The first result of a place, and a webhook that asks for alerts."""
    result = a_speed(100.0)
    enter(database, result)
    with database.write() as session:
        webhooks.create(session, "https://hooks.example.org", [WebhookEvent.ALERT_FIRED], "somebody")
    return result


@pytest.fixture
def speeds(database: Database) -> Speeds:
    hours = iter(range(1, 1000))

    def enter_all(*values: float, **changes: Any) -> list[dict[str, Any]]:
        enter(database, *(a_speed(value, next(hours), **changes) for value in values))
        with database.write() as session:
            return [json.loads(each.body)["data"] for each in outbox.take(session, 100)]

    return enter_all


def rule(database: Database, result: Result, **asked: Any) -> AlertView:
    with database.write() as session:
        return alerts.create(session, AlertRequest(result_id=result.id, **asked), "somebody")


def test_a_bound_fires_once_for_each_crossing(database: Database, first: Result, speeds: Speeds) -> None:
    made = rule(database, first, kind="threshold", threshold=80.0)
    assert (made.metric, made.label, made.fired_at) == ("tokens_per_s", "baseline", None)
    assert speeds(90.0, 80.5) == [], "the interval of 80.5 contains the bound"
    (fired,) = speeds(70.0, 60.0)
    assert (fired["rule_id"], fired["value"], fired["threshold"]) == (made.id, 70.0, 80.0)
    assert fired["ci"] == [69.3, 70.7]
    assert speeds(90.0) == []
    assert [each["value"] for each in speeds(50.0)] == [50.0]
    with database.read() as session:
        (listed,) = alerts.list_(session)
    assert listed.fired_at is not None


def test_of_a_metric_that_should_be_low_more_is_worse(database: Database, first: Result) -> None:
    rule(database, first, kind="threshold", metric="ttft_s", threshold=0.5)
    for seconds, fired in ((0.4, 0), (0.6, 1)):
        metrics = {
            name: a_metric(name, value) for name, value in (("tokens_per_s", 100.0), ("ttft_s", seconds))
        }
        enter(database, a_result(metrics, warnings=(), replicates=5, measured_at=NOON + timedelta(hours=1)))
        with database.write() as session:
            assert len(outbox.take(session, 100)) == fired


@pytest.mark.parametrize(
    "changes",
    [{"valid": False}, {"hardware": "1x Other CPU"}, {"replicates": 1}],
    ids=lambda each: next(iter(each)),
)
def test_what_is_not_the_current_result_of_the_place_crosses_nothing(
    database: Database, first: Result, speeds: Speeds, changes: dict[str, Any]
) -> None:
    """An invalid one, one at another place, and one that does not become current."""
    rule(database, first, kind="threshold", threshold=80.0)
    assert speeds(10.0, **changes) == []


def test_a_change_of_the_level_fires_once(database: Database, first: Result, speeds: Speeds) -> None:
    level = [100.0, 101.0, 99.5, 100.5, 99.0, 100.2, 100.8]
    assert speeds(*level) == []
    made = rule(database, first, kind="change_point")
    (fired,) = speeds(50.0, 50.5, 49.5, 50.2, 49.9, 50.1)
    assert fired["rule_id"] == made.id
    assert fired["change"]["improved"] is False
    assert fired["change"]["ratio"] == pytest.approx(0.5, rel=0.05)


def test_a_change_of_before_the_rule_is_not_told(database: Database, first: Result, speeds: Speeds) -> None:
    speeds(100.0, 101.0, 99.5, 100.5, 99.0, 50.0, 50.5, 49.5, 50.2)
    rule(database, first, kind="change_point")
    assert speeds(50.1, 49.8, 50.3) == []


def test_a_result_that_is_rolled_back_is_never_told(
    database: Database, first: Result, speeds: Speeds
) -> None:
    rule(database, first, kind="threshold", threshold=80.0)

    def fail() -> None:
        with database.write() as session:
            slow = a_speed(10.0, 1)
            results.add(session, slow, {})
            standings.enter(session, slow)
            raise RuntimeError("the transaction fails")

    with pytest.raises(RuntimeError):
        fail()
    assert speeds() == []
    with database.read() as session:
        assert alerts.list_(session)[0].fired_at is None


def test_there_may_be_so_many_rules_and_each_has_a_place(
    database: Database, first: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "MOST_RULES", 1)
    made = rule(database, first, kind="change_point")
    with pytest.raises(ConflictError, match="delete one first"):
        rule(database, first, kind="change_point")
    with database.write() as session:
        assert alerts.remove(session, made.id).kind is AlertKind.CHANGE_POINT
    with pytest.raises(NotFoundError):
        rule(database, a_speed(1.0), kind="change_point")
    with pytest.raises(NotFoundError), database.write() as session:
        alerts.remove(session, new_id())


def test_one_rule_too_many_is_a_conflict(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MOST_RULES", 1)
    speed = a_speed(100.0)
    enter(service.database, speed)
    asked = {"result_id": speed.id, "kind": "change_point"}
    assert [service.client.post("/v1/alerts", json=asked).status_code for _ in range(2)] == [201, 409]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"threshold": None}, "threshold"),
        ({"kind": "change_point"}, "threshold"),
        ({"metric": "speed"}, "metric"),
        ({"kind": "sometimes"}, "kind"),
        ({"result_id": "x"}, "result_id"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_with_its_field(
    any_service: Served, changes: dict[str, Any], field: str
) -> None:
    asked = {"result_id": new_id(), "kind": "threshold", "threshold": 1.0} | changes
    answer = any_service.client.post("/v1/alerts", json=asked)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_a_rule_calls_the_webhook(tmp_path: Path) -> None:
    """From end to end: by HTTP, a job that a worker ends, and a receiver."""
    with (
        receiving() as receiver,
        serving(f"sqlite:///{tmp_path / 'optigpu.db'}", webhook_allowed_hosts=("127.0.0.1",)) as served,
    ):
        speed = a_speed(100.0)
        enter(served.database, speed)
        asked = {"url": receiver.url(), "events": ["alert.fired"]}
        assert served.client.post("/v1/webhooks", json=asked).status_code == 201
        bound = {"result_id": speed.id, "kind": "threshold", "threshold": 80.0}
        made = served.client.post("/v1/alerts", json=bound)
        assert made.status_code == 201, made.text
        served.submit()
        served.finish(served.claim(), a_speed(60.0, 1))
        assert eventually(lambda: receiver.received)
        (listed,) = served.client.get("/v1/alerts").json()["alerts"]
        assert listed["fired_at"] is not None
        place = f"/v1/alerts/{made.json()['id']}"
        assert [served.client.delete(place).status_code for _ in range(2)] == [204, 404]
        actions = [each["action"] for each in served.client.get("/v1/audit").json()["changes"]]
        assert {"alert.created", "alert.deleted"} <= set(actions)
    told = json.loads(receiver.received[0].body)
    assert (told["type"], told["data"]["rule_id"], told["data"]["value"]) == (
        "alert.fired",
        made.json()["id"],
        60.0,
    )
