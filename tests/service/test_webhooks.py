"""Webhooks and alert rules: events are written with what they tell, signed, sent, sent again, and given up."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from api.deliveries import Deliveries
from api.openapi import GATES
from optigpu.documents.administration import (
    AlertRequest,
    AlertView,
    DeliveryView,
    NewWebhookView,
    WebhookEvent,
)
from optigpu.documents.result import Result
from optigpu.store import alerts, jobs, webhooks
from optigpu.store.database import Database
from optigpu.store.tables import WebhookDelivery
from optigpu.vocabulary import new_id, utc_now
from tests.service.pages import Browser
from tests.service.processes import eventually
from tests.service.receiver import Receiver, receiving
from tests.service.records import NOON, a_metric, a_result, a_spec, a_sure_speed, entered
from tests.service.serving import Served, serving

pytestmark = pytest.mark.slow

BOTH = ["job.finished", "regression.found"]
LOCAL = ("127.0.0.1",)
Speeds = Callable[..., list[dict[str, Any]]]
"""Enters results of these speeds at one place, one after the other, and returns the alerts that fired."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def webhook(database: Database, url: str, *events: WebhookEvent) -> NewWebhookView:
    """A webhook for these events, for all of them without any."""
    with database.write() as session:
        return webhooks.create(session, url, events or tuple(WebhookEvent), "somebody")


def cancelled_job(database: Database) -> str:
    """A job that has ended."""
    with database.write() as session:
        job_id = jobs.submit(session, a_spec(name="a run")).job.id
        jobs.request_cancel(session, job_id)
    return job_id


def deliver(database: Database) -> int:
    """Sends what is due, once."""
    return asyncio.run(Deliveries(database, LOCAL).deliver_due())


def deliveries(database: Database, made: NewWebhookView) -> tuple[DeliveryView, ...]:
    with database.read() as session:
        return webhooks.deliveries(session, made.id).deliveries


def test_a_job_that_ends_is_told_signed_to_who_asked(database: Database, receiver: Receiver) -> None:
    made = webhook(database, receiver.url())
    webhook(database, receiver.url(), WebhookEvent.REGRESSION_FOUND)
    job_id = cancelled_job(database)
    assert deliver(database) == 1
    (request,) = receiver.received
    event = json.loads(request.body)
    assert event["type"] == "job.finished"
    assert event["data"] == {
        "job_id": job_id,
        "state": "cancelled",
        "reason": "Cancelled on request, before it began.",
        "name": "a run",
    }
    identity, stamp = request.headers["webhook-id"], request.headers["webhook-timestamp"]
    key = base64.b64decode(made.secret.removeprefix("whsec_"))
    signed = hmac.new(key, f"{identity}.{stamp}.".encode() + request.body, hashlib.sha256).digest()
    assert request.headers["webhook-signature"] == f"v1,{base64.b64encode(signed).decode()}"
    assert abs(int(stamp) - utc_now().timestamp()) < 60
    (delivery,) = deliveries(database, made)
    assert (delivery.id, delivery.attempts, delivery.next_at) == (identity, 1, None)
    assert delivery.delivered_at is not None
    assert deliver(database) == 0


def test_an_event_that_is_rolled_back_is_never_told(database: Database) -> None:
    made = webhook(database, "https://hooks.example.org")

    def fail() -> None:
        with database.write() as session:
            jobs.request_cancel(session, jobs.submit(session, a_spec()).job.id)
            raise RuntimeError("the transaction fails")

    with pytest.raises(RuntimeError):
        fail()
    assert deliveries(database, made) == ()


def test_a_delivery_that_fails_is_sent_again_until_it_is_given_up(
    database: Database, receiver: Receiver
) -> None:
    made = webhook(database, receiver.url())
    cancelled_job(database)
    receiver.answers = [500] * 8
    for attempt in range(1, 9):
        assert deliver(database) == 1
        (delivery,) = deliveries(database, made)
        assert (delivery.attempts, delivery.delivered_at) == (attempt, None)
        assert delivery.last_error == "The receiver answered with status 500."
        assert (delivery.next_at is None) == (attempt == 8)
        assert deliver(database) == 0, "it waits"
        with database.write() as session:
            row = session.scalars(select(WebhookDelivery)).one()
            row.next_at = row.next_at and utc_now()
    assert len({request.headers["webhook-id"] for request in receiver.received}) == 1


def test_a_receiver_that_recovers_gets_it(database: Database, receiver: Receiver) -> None:
    made = webhook(database, receiver.url())
    cancelled_job(database)
    receiver.answers = [503]
    deliver(database)
    with database.write() as session:
        session.scalars(select(WebhookDelivery)).one().next_at = utc_now()
    deliver(database)
    (delivery,) = deliveries(database, made)
    assert (delivery.attempts, delivery.last_error, delivery.next_at) == (2, None, None)


def test_one_process_at_a_time_sends_a_delivery(database: Database) -> None:
    """One that dies while it sends leaves the delivery to another, whose word then counts."""
    made = webhook(database, "https://hooks.example.org")
    cancelled_job(database)
    with database.write() as session:
        (first,) = webhooks.take(session, 8)
    with database.write() as session:
        assert webhooks.take(session, 8) == []
    later = utc_now() + timedelta(seconds=webhooks.SENDING_S + 1)
    with database.write() as session:
        (second,) = webhooks.take(session, 8, now=later)
        webhooks.delivered(session, second)
    with database.write() as session:
        webhooks.failed(session, first, "too late")
    (delivery,) = deliveries(database, made)
    assert (delivery.attempts, delivery.last_error) == (2, None)
    assert delivery.delivered_at is not None


def test_old_deliveries_are_forgotten_and_those_that_wait_are_not(database: Database) -> None:
    made = webhook(database, "https://hooks.example.org")
    cancelled_job(database)
    later = utc_now() + webhooks.KEPT + timedelta(days=1)
    with database.write() as session:
        webhooks.forget(session, now=later)
    assert len(deliveries(database, made)) == 1
    with database.write() as session:
        webhooks.delivered(session, webhooks.take(session, 1)[0])
        webhooks.forget(session, now=later)
    assert deliveries(database, made) == ()


def a_speed(value: float, hour: int = 0, **changes: Any) -> Result:
    """A careful result at one place of the leaderboard."""
    careful: dict[str, Any] = {"warnings": (), "replicates": 5}
    return a_sure_speed(value, measured_at=NOON + timedelta(hours=hour), **careful | changes)


def test_a_result_that_is_worse_than_the_one_before_is_a_regression(database: Database) -> None:
    made = webhook(database, "https://hooks.example.org")
    before, slower = a_speed(100.0, 0), a_speed(50.0, 1)
    entered(database, before, slower)
    with database.write() as session:
        (taken,) = webhooks.take(session, 8)
    told = json.loads(taken.body)
    assert told["type"] == "regression.found"
    assert (told["data"]["result_id"], told["data"]["previous_result_id"]) == (slower.id, before.id)
    assert (told["data"]["metric"], told["data"]["ratio"]) == ("tokens_per_s", 0.5)
    assert told["data"]["ci"][1] < 1
    assert [delivery.event for delivery in deliveries(database, made)] == ["regression.found"]


@pytest.mark.parametrize(
    "changes",
    [
        {"value": 200.0},
        {"value": 100.2},
        {"replicates": 1},
        {"valid": False},
        {"hardware": "1x Other CPU"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_no_regression_is_not_told(sqlite_database: Database, changes: dict[str, Any]) -> None:
    """A better result, the same one, one that does not become current, and one at another place."""
    place = f"preset:{'-'.join(map(str, changes.values()))}"  # the database is shared
    made = webhook(sqlite_database, "https://hooks.example.org")
    slower: dict[str, Any] = {"value": 50.0, "hour": 1, "model": place} | changes
    entered(sqlite_database, a_speed(100.0, 0, model=place), a_speed(**slower))
    assert deliveries(sqlite_database, made) == ()


def test_a_loss_beside_many_places_has_to_be_rarer(database: Database) -> None:
    webhook(database, "https://hooks.example.org", WebhookEvent.REGRESSION_FOUND)

    def told(place: int, *values: float) -> list[float]:
        for hour, value in enumerate(values):
            speed = {"tokens_per_s": a_metric("tokens_per_s", value, (0.95 * value, 1.05 * value))}
            careful: dict[str, Any] = {"warnings": (), "replicates": 5, "hardware": f"1x CPU {place}"}
            entered(database, a_result(speed, measured_at=NOON + timedelta(hours=hour), **careful))
        with database.write() as session:
            return [json.loads(each.body)["data"]["value"] for each in webhooks.take(session, 100)]

    assert told(0, 100.0, 92.0) == [92.0]
    for place in range(1, 20):
        assert told(place, 100.0, 100.1) == []
    assert told(20, 100.0, 92.0) == [], "one of twenty comes by chance"
    assert told(21, 100.0, 60.0) == [60.0]


@pytest.mark.parametrize("chances", [[1.0, 0.004], [0.9] * 20 + [0.001]])
def test_a_gate_that_found_a_loss_is_told_if_it_is_rare_beside_the_other_series(
    service: Served, chances: list[float]
) -> None:
    webhook(service.database, "https://hooks.example.org", WebhookEvent.GATE_WORSE)
    posted: dict[str, Any] = GATES["worse"].document
    kept = []
    for number, chance in enumerate([0.005, *chances, 0.04]):
        verdict = "worse" if chance < 0.05 else "no worse"
        outcome = posted["outcome"] | {"chance": chance, "verdict": verdict}
        answer = service.client.post("/v1/gates", json={"series": f"series {number}", "outcome": outcome})
        assert answer.status_code == 201, answer.text
        kept.append(answer.json())
    assert [each["told"] for each in kept if each["outcome"]["chance"] < 0.9] == [True, True, False]
    with service.database.read() as session:
        bodies = session.scalars(select(WebhookDelivery.body).order_by(WebhookDelivery.id)).all()
    events = [json.loads(each) for each in bodies]
    assert [each["data"]["gate_id"] for each in events] == [each["id"] for each in kept if each["told"]]
    assert {each["type"] for each in events} == {"gate.worse"}
    assert service.client.get("/v1/gates").json()["gates"] == kept[::-1]
    assert service.client.get("/v1/gates?series=series 0").json()["gates"] == kept[:1]


def test_a_webhook_is_created_listed_and_deleted_and_its_secret_shown_once(service: Served) -> None:
    body = {"url": "https://hooks.example.org/optigpu", "events": BOTH}
    answer = service.client.post("/v1/webhooks", json=body)
    assert answer.status_code == 201
    made = answer.json()
    assert made["secret"].startswith("whsec_")
    (listed,) = service.client.get("/v1/webhooks").json()["webhooks"]
    assert listed == {name: value for name, value in made.items() if name != "secret"}
    cancelled_job(service.database)
    page = service.client.get(f"/v1/webhooks/{made['id']}/deliveries").json()
    assert [each["event"] for each in page["deliveries"]] == ["job.finished"]
    assert service.client.delete(f"/v1/webhooks/{made['id']}").status_code == 204
    assert service.client.get("/v1/webhooks").json() == {"webhooks": []}
    for method, path in (("DELETE", ""), ("GET", "/deliveries")):
        assert service.client.request(method, f"/v1/webhooks/{made['id']}{path}").status_code == 404


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.org",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://user:password@hooks.example.org",
        "https://hooks.example.org/#part",
        "ftp://hooks.example.org",
        "//hooks.example.org",
        "not an address",
        "https://hooks.example.org/\r\nX-Injected: 1",
    ],
)
def test_an_address_that_may_not_be_sent_to_is_refused(any_service: Served, url: str) -> None:
    answer = any_service.client.post("/v1/webhooks", json={"url": url, "events": BOTH})
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"] == "url"


def test_there_may_be_so_many_webhooks_and_no_more(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "MOST_WEBHOOKS", 1)
    asked = {"url": "https://hooks.example.org", "events": BOTH}
    assert [service.client.post("/v1/webhooks", json=asked).status_code for _ in range(2)] == [201, 409]


def test_an_administrator_makes_one_on_its_page_follows_it_and_deletes_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, webhook_allowed_hosts=LOCAL) as served, Browser(served) as browser:
        assert "There are no webhooks yet." in browser.read("/webhooks")
        fields: dict[str, str | list[str]] = {
            "url": receiver.url(),
            "events": ["job.finished", "alert.fired"],
        }
        answer = browser.send("/webhooks", "/webhooks", fields)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        (secret,) = re.findall(r"whsec_[\w+/=]+", answer.text)
        with served.database.read() as session:
            (made,) = webhooks.list_(session)
        assert made.events == (WebhookEvent.JOB_FINISHED, WebhookEvent.ALERT_FIRED)
        page = f"/webhooks?webhook={made.id}"
        assert "Nothing was sent yet." in browser.read(page)
        cancelled_job(served.database)
        assert eventually(lambda: ">no</td>" not in browser.read(page) and receiver.received)
        assert all(words in browser.read(page) for words in ("job.finished", receiver.url()))
        assert secret not in browser.read(page)
        assert browser.send("/webhooks", f"/webhooks/{made.id}/delete").headers["location"] == "/webhooks"
        assert made.id not in browser.read("/webhooks")
        browser.read(page, 404)
        actions = [each["action"] for each in served.client.get("/v1/audit").json()["changes"]]
    assert actions == ["webhook.deleted", "webhook.created"]


@pytest.fixture
def first(database: Database) -> Result:
    """The first result of a place, and a webhook that asks for alerts."""
    result = a_speed(100.0)
    entered(database, result)
    with database.write() as session:
        webhooks.create(session, "https://hooks.example.org", [WebhookEvent.ALERT_FIRED], "somebody")
    return result


@pytest.fixture
def speeds(database: Database) -> Speeds:
    hours = iter(range(1, 1000))

    def enter_all(*values: float, **changes: Any) -> list[dict[str, Any]]:
        entered(database, *(a_speed(value, next(hours), **changes) for value in values))
        with database.write() as session:
            return [json.loads(each.body)["data"] for each in webhooks.take(session, 100)]

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
        entered(database, a_result(metrics, warnings=(), replicates=5, measured_at=NOON + timedelta(hours=1)))
        with database.write() as session:
            assert len(webhooks.take(session, 100)) == fired


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


def test_a_change_beside_many_rules_has_to_be_rarer(
    database: Database, first: Result, speeds: Speeds
) -> None:
    speeds(100.0, 101.0, 99.5, 100.5)
    rule(database, first, kind="change_point")
    other = a_speed(100.0, model="preset:gpt2-medium")
    entered(database, other)
    for _ in range(99):
        rule(database, other, kind="change_point")
    # Eight values: five before and three after come by chance in one of fifty orders; fifty values in hardly one.
    assert speeds(50.0, 50.5, 49.5) == []
    (fired,) = speeds(*(50 + 0.1 * (number % 7) for number in range(8)))
    assert fired["change"]["chance"] < 0.05 / 100


def test_a_change_of_before_the_rule_is_not_told(database: Database, first: Result, speeds: Speeds) -> None:
    speeds(100.0, 101.0, 99.5, 100.5, 99.0, 50.0, 50.5, 49.5, 50.2)
    rule(database, first, kind="change_point")
    assert speeds(50.1, 49.8, 50.3) == []


def test_one_rule_too_many_is_a_conflict(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MOST_RULES", 1)
    speed = a_speed(100.0)
    entered(service.database, speed)
    asked = {"result_id": speed.id, "kind": "change_point"}
    assert [service.client.post("/v1/alerts", json=asked).status_code for _ in range(2)] == [201, 409]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"threshold": None}, "threshold"),
        ({"kind": "change_point"}, "threshold"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_with_its_field(
    any_service: Served, changes: dict[str, Any], field: str
) -> None:
    asked = {"result_id": new_id(), "kind": "threshold", "threshold": 1.0} | changes
    answer = any_service.client.post("/v1/alerts", json=asked)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
