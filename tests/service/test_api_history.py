"""The history of a variant on a class of hardware, over HTTP."""

from datetime import timedelta
from typing import Any

from optigpu.documents.result import Result
from optigpu.store import results, standings
from tests.service.records import NOON, a_metric, a_result
from tests.service.serving import Served

OLD, NEW = {"optigpu": "0.1.0", "torch": "2.13.0"}, {"optigpu": "0.1.0", "torch": "2.14.0"}


def test_a_history_has_the_valid_results_of_the_place_in_order_and_the_changes_of_their_level(
    service: Served,
) -> None:
    slow = [measured(hour, 10.0 + 0.1 * (hour % 3), OLD) for hour in range(8)]
    fast = [measured(hour, 20.0 + 0.1 * (hour % 3), NEW) for hour in range(8, 16)]
    others = [
        measured(3, 99.0, OLD, valid=False),
        measured(3, 99.0, OLD, hardware="2x Test CPU"),
        measured(3, 99.0, OLD, stack=("bf16",)),
    ]
    enter(service, *fast, *slow, *others)
    found = history(service, slow[0].id)
    assert [point["result_id"] for point in found["points"]] == [each.id for each in slow + fast]
    assert [point["standing"] for point in found["points"]].count("current") == 1
    assert found["points"][0]["ci"] == [9.9, 10.1]
    (change,) = found["changes"]
    assert (change["result_id"], change["improved"]) == (fast[0].id, True)
    assert change["versions"] == {"torch": ["2.13.0", "2.14.0"]}
    assert (found["label"], found["hardware"], found["metric"]) == ("baseline", "1x Test CPU", "tokens_per_s")


def test_a_long_history_comes_in_pages_the_newest_first(service: Served) -> None:
    made = [measured(hour, 1.0 + hour, OLD) for hour in range(5)]
    enter(service, *made)
    newest = history(service, made[0].id, limit=3)
    older = history(service, made[0].id, limit=3, cursor=newest["next_cursor"])
    assert [point["value"] for point in older["points"] + newest["points"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert older["next_cursor"] is None


def test_a_history_of_nothing_is_refused_with_a_reason(service: Served) -> None:
    enter(service, made := measured(0, 1.0, OLD))
    missing = service.client.get("/v1/results/0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11/history")
    assert (missing.status_code, "There is no result" in missing.json()["detail"]) == (404, True)
    for query in ("metric=speed", "limit=0", "limit=1001", "cursor=x", "metrics=tokens_per_s"):
        assert service.client.get(f"/v1/results/{made.id}/history?{query}").status_code == 422
    assert history(service, made.id, metric="ttft_s")["points"] == []


def measured(hour: int, value: float, software: dict[str, str], **changes: Any) -> Result:
    metric = a_metric("tokens_per_s", value, (0.99 * value, 1.01 * value))
    at = NOON + timedelta(hours=hour)
    return a_result({"tokens_per_s": metric}, measured_at=at, software=software, **changes)


def enter(service: Served, *made: Result) -> None:
    with service.database.write() as session:
        for result in made:
            results.add(session, result, {})
            standings.enter(session, result)


def history(service: Served, result_id: str, **query: Any) -> dict[str, Any]:
    answer = service.client.get(f"/v1/results/{result_id}/history", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
