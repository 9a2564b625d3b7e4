"""Messages: each is read or refused with its fields, stored whole or not at all, and each of its reports once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from api.device_messages import ClaimRequest, DeviceMessage, KeyRequest, RunRequest
from api.inputs import strict_document
from api.openapi import CLAIMS, KEYS, MANIFESTS, MESSAGES, RUNS
from api.problems import ProblemError
from optigpu.documents.devices import MOST_US
from optigpu.documents.manifest import ModelManifest
from optigpu.store.tables import Device, DeviceReportRow
from tests.service.device_client import EdgeDevice, enrolled, golden, manifest, message, report
from tests.service.serving import Served

MODEL_PLACE = "/v1/edge/models"
Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
PLACES = tuple(report())
NUMBERS = [
    ("sequence",),
    ("input_bytes",),
    ("clock_hz",),
    ("warmup",),
    ("arena_bytes",),
    ("heap_free",),
    ("started_us",),
    ("ticks_us",),
    ("windows", 0, "count"),
    ("windows", 0, "total_us"),
    ("windows", 0, "energy_uj"),
    ("latency_us", "count"),
    ("latency_us", "min"),
    ("latency_us", "p50"),
    ("power", "idle_uw"),
    ("golden", "count"),
]
NULLABLE = {("windows", 0, "energy_uj"), ("latency_us", "min"), ("latency_us", "p50"), ("power", "idle_uw")}
POSITIVE = {
    ("sequence",),
    ("input_bytes",),
    ("windows", 0, "count"),
    ("windows", 0, "total_us"),
    ("golden", "count"),
}


@pytest.fixture
def device(service: Served) -> EdgeDevice:
    """A device that has just enrolled, and the model that it reports on."""
    assert service.client.post(MODEL_PLACE, json=manifest()).status_code == 201
    return enrolled(service.client, service.database, name="by the window")


def rows(service: Served) -> list[DeviceReportRow]:
    with service.database.read() as session:
        return list(session.scalars(select(DeviceReportRow).order_by(DeviceReportRow.sequence)))


def test_a_report_is_stored_with_what_a_leaderboard_needs(service: Served, device: EdgeDevice) -> None:
    sent = report(7, device.run())
    (answer,) = device.reports(sent)
    (row,) = rows(service)
    assert (row.id, row.device_id, row.document) == (answer["report_id"], device.id, sent)
    assert (row.runner, row.source, row.state) == ("tflm-native", "device", answer["state"])
    assert (row.count, row.latency_p50_us, row.power_source) == (640, 78_480, "ina226")
    assert row.energy_per_inference_uj == 5_124_000 / 128


def test_reports_are_read_newest_first_page_by_page(service: Served, device: EdgeDevice) -> None:
    device.reports(*(report(sequence) for sequence in range(1, 6)))
    place = f"/v1/devices/{device.id}/reports"
    found: list[int] = []
    cursor: dict[str, str] = {}
    for _ in range(3):
        page = service.client.get(place, params={"limit": "2"} | cursor).json()
        found += [each["document"]["sequence"] for each in page["reports"]]
        cursor = {"cursor": page["next_cursor"]} if page["next_cursor"] else {}
    assert found == [5, 4, 3, 2, 1]
    assert cursor == {}
    (first,) = service.client.get(place, params={"limit": "1"}).json()["reports"]
    assert (first["state"], first["ranked"], first["reasons"]) == ("accepted", False, ["unwitnessed"])


def test_a_batch_of_the_most_reports_is_stored_in_its_order(service: Served, device: EdgeDevice) -> None:
    answers = device.reports(*(report(sequence) for sequence in range(32, 0, -1)))
    assert [answer["sequence"] for answer in answers] == list(range(32, 0, -1))
    assert [row.sequence for row in rows(service)] == list(range(1, 33))
    response = device.post("measurements", message(*(report(sequence) for sequence in range(33, 66))))
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "reports"
    assert len(rows(service)) == 32


def test_the_longest_answer_fits_into_what_a_board_reads(service: Served, device: EdgeDevice) -> None:
    lies: dict[str, Any] = {
        "run_id": "0" * 8 + "-0000-0000-0000-" + "0" * 12,
        "golden": golden("other"),
        "windows": [{"count": 128, "total_us": 1, "energy_uj": 0}],
        "runner": {"name": "simulator", "version": "1"},
        "started_us": 0,
        "error": "It broke.",
        "board": "other",
    }
    answer = device.post("measurements", message(*(report(sequence, **lies) for sequence in range(1, 33))))
    assert len(answer.json()["reports"][0]["reasons"]) >= 6
    assert len(answer.content) < 16_384


def test_a_heartbeat_is_a_message_without_reports(service: Served, device: EdgeDevice) -> None:
    status: dict[str, Any] = {
        "queue_depth": 3,
        "dropped": 2,
        "rssi": None,
        "reset_reason": "watchdog",
        "heap_free": 1234,
    }
    answer = device.post("measurements", message(**status))
    assert answer.json()["reports"] == []
    assert answer.json()["rotate"] is False
    view = service.client.get(f"/v1/devices/{device.id}").json()
    assert {name: view[name] for name in status} == status
    assert (view["name"], view["agent_version"], view["boot_id"], view["clock_synchronised"]) == (
        "by the window",
        "0.1.0",
        device.boot,
        True,
    )
    assert view["last_seen_at"] >= view["created_at"]
    assert service.client.get(view["links"]["self"]).json() == view
    assert service.client.get(view["links"]["reports"]).json() == {"reports": [], "next_cursor": None}


@pytest.mark.parametrize("path", ["", "/reports"])
def test_an_unknown_device_is_not_there(any_service: Served, path: str) -> None:
    answer = any_service.client.get(f"/v1/devices/01980000-0000-7000-8000-000000000000{path}")
    assert answer.status_code == 404
    assert "There is no device" in answer.json()["detail"]


def test_the_same_report_in_another_message_is_a_duplicate(service: Served, device: EdgeDevice) -> None:
    sent = report(1)
    (first,) = device.reports(sent)
    again = device.reports(report(2), sent, waited_us=None)
    assert again[1] == first | {"duplicate": True}
    assert [row.sequence for row in rows(service)] == [1, 2]


def test_another_order_of_keys_and_spaces_is_the_same_report(service: Served, device: EdgeDevice) -> None:
    sent = report(1)
    device.reports(sent)
    shuffled = dict(reversed(sent.items()))
    body = json.dumps(message(shuffled), indent=2).encode()
    assert device.post("measurements", body).json()["reports"][0]["duplicate"] is True


def test_other_content_under_the_same_identity_is_a_conflict(service: Served, device: EdgeDevice) -> None:
    sent = report(1)
    (first,) = device.reports(sent)
    answers = device.reports(sent | {"heap_free": 1}, sent, report(2))
    assert [answer["state"] for answer in answers] == ["conflict", first["state"], first["state"]]
    assert (answers[0]["report_id"], answers[0]["ranked"]) == (None, False)
    assert [row.document["heap_free"] for row in rows(service)] == [7_900_000] * 2


def test_two_devices_and_two_boots_may_use_the_same_sequences(service: Served, device: EdgeDevice) -> None:
    other = enrolled(service.client, service.database)
    for each in (device, other):
        for boot in ("a" * 16, "b" * 16):
            (answer,) = each.reports(report(1, boot_id=boot))
            assert answer["duplicate"] is False
    assert len(rows(service)) == 4


ABSURD = [
    ({"windows": [{"count": 1, "total_us": 1}]}, "windows.0.energy_uj"),
    ({"windows": [{"count": 1, "total_us": 1, "energy_uj": None}] * 101}, "windows"),
    ({"windows": None}, "windows"),
    ({"latency_us": {"count": 1, "min": 10**400, "p50": None, "p90": None, "p99": None}}, "latency_us.min"),
    ({"runner": {"name": "gpu", "version": "1"}}, "runner.name"),
    ({"runner": {"name": "tflm-native", "version": "1", "x": 1}}, "runner.x"),
    ({"input_source": "dream"}, "input_source"),
    ({"run_id": "not-a-uuid"}, "run_id"),
    ({"run_id": "01980000-0000-7000-8000-00000000000A"}, "run_id"),
    ({"model_sha256": "0" * 63}, "model_sha256"),
    ({"golden": {"count": 1, "digest": "z" * 64}}, "golden.digest"),
    ({"error": "x" * 501}, "error"),
    ({"error": "a\x00b"}, "error"),
    ({"colour": "red"}, "colour"),
    ({"schema": 2}, "schema"),
]


@pytest.mark.parametrize(("change", "field"), ABSURD)
def test_a_malformed_report_is_named_and_nothing_of_its_message_is_stored(
    any_service: Served, change: dict[str, Any], field: str
) -> None:
    device = enrolled(any_service.client, any_service.database)
    answer = device.post("measurements", message(report(1), report(2) | change, report(3)))
    assert answer.status_code == 422, answer.text
    assert [entry["field"] for entry in answer.json()["errors"]] == [f"reports.1.report.{field}"]
    listed = any_service.client.get(f"/v1/devices/{device.id}/reports").json()
    assert listed["reports"] == []
    with any_service.database.read() as session:
        assert session.get_one(Device, device.id).queue_depth is None, "nothing of the message counts"


def test_a_surrogate_and_any_other_text_are_no_harm(service: Served, device: EdgeDevice) -> None:
    body = json.dumps(message(report(1, error="X"))).replace('"X"', '"\\ud800"').encode()
    assert device.post("measurements", body).status_code == 400
    (answer,) = device.reports(report(1, error="zu heiß \u202e 🔥 \n"))
    assert "error" in answer["reasons"]


def test_a_manifest_is_entered_once_and_never_changed(service: Served) -> None:
    first = service.client.post(MODEL_PLACE, json=manifest())
    again = service.client.post(MODEL_PLACE, json=manifest())
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    other = manifest(golden=manifest()["golden"] | {"outputs": ["0000"] * 3})
    assert service.client.post(MODEL_PLACE, json=other).status_code == 409
    (listed,) = service.client.get(MODEL_PLACE).json()["models"]
    assert listed == first.json()
    assert listed["manifest"]["golden"]["outputs"] == manifest()["golden"]["outputs"]


def read(document: Any) -> DeviceMessage | None:
    """The message; None if it is refused as a wrong message is."""
    try:
        return strict_document(json.dumps(document).encode(), DeviceMessage)
    except ProblemError as error:
        return None if error.status in (400, 422) and error.errors else pytest.fail(str(error))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a place."""
    first, *others = place
    copy = list(document) if isinstance(document, list) else dict(document)
    copy[first] = changed(copy[first], tuple(others), value) if others else value
    return copy


@given(Json)
def test_any_document_is_read_or_refused(document: Any) -> None:
    assert read(document) is None


@given(st.sampled_from(PLACES), Json)
def test_any_value_in_any_place_is_read_or_refused(place: str, value: Any) -> None:
    found = read(message(report() | {place: value}))
    if found is not None:
        kept = found.reports[0].report.model_dump(mode="json")
        assert kept[place] == value


@given(st.sampled_from(NUMBERS), st.none() | st.booleans() | st.integers() | st.floats() | st.text())
def test_a_number_is_an_integer_within_its_bounds(place: tuple[Any, ...], value: Any) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    least = 1 if place in POSITIVE else 0
    valid = (is_whole and least <= value <= MOST_US) or (value is None and place in NULLABLE)
    found = read(message(changed(report(), place, value)))
    assert (found is not None) is valid


@given(st.binary())
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(ProblemError) as refused:
        strict_document(body, DeviceMessage)
    assert refused.value.status in (400, 422)


@pytest.mark.parametrize(
    ("model", "examples"),
    [
        (ClaimRequest, CLAIMS),
        (RunRequest, RUNS),
        (KeyRequest, KEYS),
        (DeviceMessage, MESSAGES),
        (ModelManifest, MANIFESTS),
    ],
)
def test_every_example_of_the_documentation_is_read(model: Any, examples: Any) -> None:
    for example in examples.values():
        strict_document(json.dumps(example.document).encode(), model)
