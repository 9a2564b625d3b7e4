"""The edge leaderboard over HTTP: which report stands for a device, partitions, ranks, costs, and workers beside it."""

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest

from api import edge_boards
from api.edge_boards import SECONDS_PER_YEAR
from api.routes.edge_leaderboard import edge_grids
from optigpu.client import Client
from optigpu.documents.devices import DeviceSource, Flag, Reason
from optigpu.documents.facts import NetworkFacts
from optigpu.store import devices
from optigpu.vocabulary import DeviceKind
from tests.service import device_client
from tests.service.records import (
    BOARD,
    MODEL,
    OTHER_MODEL,
    a_classification,
    a_device,
    a_manifest,
    a_report,
    known,
    stored,
)
from tests.service.serving import Served
from tests.service.test_devices_judgement import begun, judged

SIMULATOR = {"name": "simulator", "version": "1"}
Page = dict[str, Any]


def page(service: Served, **query: Any) -> Page:
    answer = service.client.get("/v1/edge/leaderboard", params=query)
    assert answer.status_code == 200, answer.text
    found: Page = answer.json()
    return found


def board(service: Served, **query: Any) -> Page:
    """The only board."""
    (found,) = page(service, **query)["boards"]
    return dict(found)


def ranks(service: Served, **query: Any) -> list[tuple[int | None, str]]:
    return [(row["rank"], row["device"]) for row in board(service, **query)["rows"]]


Enter = Callable[..., str]


@pytest.fixture
def enter(service: Served) -> Enter:
    """Stores a report of a device, by the device's name; the newest is entered last."""
    ids: dict[str, str] = {}

    def entered(name: str, report: Any, *reasons: Reason, **how: Any) -> str:
        source = DeviceSource.SIMULATOR if Reason.SIMULATOR in reasons else DeviceSource.DEVICE
        with service.database.write() as session:
            if name not in ids:
                ids[name] = a_device(session, name, source)
            return stored(session, ids[name], report, *reasons, **how)

    return entered


def test_the_fastest_device_is_first_and_every_metric_has_its_order(service: Served, enter: Enter) -> None:
    enter("slow but frugal", a_report(200_000, watts=0.1))
    enter("fast", a_report(100_000, watts=0.5))
    assert ranks(service) == [(1, "fast"), (2, "slow but frugal")]
    assert ranks(service, metric="fps") == [(1, "fast"), (2, "slow but frugal")]
    for metric in ("energy", "fps_per_watt"):
        assert ranks(service, metric=metric) == [(1, "slow but frugal"), (2, "fast")]


def test_figures_come_from_the_windows_with_their_spread(service: Served, enter: Enter) -> None:
    enter("one", a_report(100_000, watts=0.5, spread_us=40_000, windows=5))
    (row,) = board(service)["rows"]
    figures = row["figures"]
    # windows of 0.10, 0.11, 0.12, 0.13 and 0.14 s; nine tenths of five windows are all of them
    assert figures["latency"] == {
        "value": 0.1, "low": 0.1, "high": pytest.approx(0.14), "reason": None,
    }  # fmt: skip
    counts = [10_000_000 // (100_000 + 10_000 * n) for n in range(5)]
    seconds = [count * (0.1 + 0.01 * n) for n, count in enumerate(counts)]
    assert figures["fps"]["value"] == pytest.approx(sum(counts) / sum(seconds))
    assert (figures["fps"]["low"], figures["fps"]["high"]) == (pytest.approx(1 / 0.14), pytest.approx(10))
    assert figures["energy"]["value"] == pytest.approx(0.5 * sum(seconds) / sum(counts))
    assert figures["fps_per_watt"]["value"] == pytest.approx(1 / figures["energy"]["value"])
    assert (row["windows"], row["inferences"], row["power_source"]) == (5, sum(counts), "ina226")


def test_devices_whose_spreads_overlap_share_a_rank(service: Served, enter: Enter) -> None:
    enter("first", a_report(100_000, spread_us=10_000))
    enter("second", a_report(105_000, spread_us=10_000))
    enter("third, which overlaps with the second alone", a_report(112_000, spread_us=10_000))
    enter("fourth", a_report(300_000))
    assert [rank for rank, _ in ranks(service)] == [1, 1, 3, 4]


def test_a_careless_or_a_lucky_rerun_does_not_take_the_place_of_a_careful_run(
    service: Served, enter: Enter
) -> None:
    careful = enter("one", a_report(100_000, windows=10, sequence=1))
    enter("one", a_report(90_000, windows=5, sequence=2))
    enter("one", a_report(80_000, windows=20, sequence=3), flags=(Flag.CLOCK_UNSYNCHRONISED,))
    enter("one", a_report(80_000, windows=20, watts=None, sequence=5))
    assert [row["report_id"] for row in board(service)["rows"]] == [careful]
    better = enter("one", a_report(120_000, windows=10, sequence=4))
    assert [row["report_id"] for row in board(service)["rows"]] == [better]


@pytest.mark.parametrize(
    "changes",
    [
        {"firmware_sha256": "e" * 64},
        {"clock_hz": 160_000_000},
        {"runner": {"name": "tflm-native", "version": "2"}},
    ],
    ids=["firmware", "clock", "runner"],
)
def test_another_setup_of_the_device_takes_the_place(
    service: Served, enter: Enter, changes: dict[str, Any]
) -> None:
    enter("one", a_report(100_000, windows=10, sequence=1))
    later = enter("one", a_report(150_000, windows=5, sequence=2, **changes))
    assert [row["report_id"] for row in board(service)["rows"]] == [later]


def test_partitions_are_never_mixed(service: Served, enter: Enter) -> None:
    enter("one", a_report(100_000, sequence=1))
    enter("one", a_report(50_000, sequence=2, model_sha256=OTHER_MODEL))
    enter("two", a_report(200_000, sequence=1))
    enter("two", a_report(90_000, sequence=2, input_source="camera"))
    enter("two", a_report(80_000, sequence=3, runner={"name": "tflm-serial", "version": "1"}))
    found = [
        (each["model_sha256"][0], each["input_source"], each["runner"], each["row_count"])
        for each in page(service)["boards"]
    ]
    assert found == [
        ("a", "fixed", "tflm-serial", 1),
        ("a", "camera", "tflm-native", 1),
        ("a", "fixed", "tflm-native", 2),
        ("b", "fixed", "tflm-native", 1),
    ]
    assert ranks(service, model=MODEL, input="fixed", runner="tflm-native") == [(1, "one"), (2, "two")]
    assert ranks(service, model="b" * 8) == [(1, "one")]
    for each in page(service)["boards"]:
        (again,) = service.client.get(each["links"]["self"]).json()["boards"]
        assert [again[name] for name in ("model_sha256", "input_source", "runner")] == [
            each[name] for name in ("model_sha256", "input_source", "runner")
        ]


@pytest.mark.parametrize(
    ("reason", "runner"),
    [
        (Reason.SIMULATOR, SIMULATOR),
        (Reason.MODEL_NOT_RANKABLE, None),
        (Reason.HOST, {"name": "tflm-host", "version": "1"}),
    ],
)
def test_what_does_not_rank_is_counted_and_shown_with_its_reason_when_asked_for(
    service: Served, enter: Enter, reason: Reason, runner: dict[str, str] | None
) -> None:
    changes: dict[str, Any] = {"runner": runner} if runner else {}
    enter("other", a_report(1_000, **changes), reason)
    found = board(service)
    assert (found["rows"], found["row_count"], found["not_ranked"]) == ([], 0, {reason.value: 1})
    assert (
        f"1 report is not ranked: {reason.value} (1). Show them with include_unranked=true." == found["note"]
    )
    (row,) = board(service, include_unranked=True)["rows"]
    assert (row["rank"], row["reasons"]) == (None, [reason.value])
    assert row["source"] == ("simulator" if reason is Reason.SIMULATOR else "device")


def test_a_fast_report_that_does_not_rank_stands_below_every_one_that_does(
    service: Served, enter: Enter
) -> None:
    enter("honest", a_report(100_000))
    enter("liar", a_report(10), Reason.FASTER_THAN_ROOFLINE)
    enter("honest", a_report(20, sequence=2), Reason.GOLDEN_FAILED)
    assert ranks(service) == [(1, "honest")]
    shown = board(service, include_unranked=True)
    assert [(row["rank"], row["device"]) for row in shown["rows"]] == [
        (1, "honest"),
        (None, "liar"),
        (None, "honest"),
    ]
    assert shown["not_ranked"] == {"faster_than_roofline": 1, "golden_failed": 1}


def test_a_device_whose_key_was_revoked_does_not_rank(service: Served, enter: Enter) -> None:
    enter("lost", a_report(100_000))
    enter("kept", a_report(200_000))
    (lost, _) = board(service)["rows"]
    with service.database.write() as session:
        devices.revoke(session, lost["device_id"])
    assert ranks(service) == [(1, "kept")]
    shown = board(service, include_unranked=True)["rows"][-1]
    assert (shown["device"], shown["reasons"]) == ("lost", ["device_revoked"])


def test_without_energy_a_device_is_listed_last_without_a_rank_and_says_why(
    service: Served, enter: Enter
) -> None:
    enter("no sensor", a_report(10_000, watts=None))
    enter("simulated power", a_report(10_000, power={"source": "simulated", "idle_uw": None}))
    broken = a_report(10_000).model_dump(mode="json")
    broken["windows"][2]["energy_uj"] = 0
    enter("broken sensor", type(a_report()).model_validate(broken))
    enter("measured", a_report(500_000))
    rows = board(service, metric="energy")["rows"]
    assert rows[0]["device"] == "measured"
    assert [row["rank"] for row in rows] == [1, None, None, None]
    reasons = {row["device"]: row["figures"]["energy"]["reason"] for row in rows}
    assert reasons["no sensor"] == "The device has no power sensor."
    assert reasons["simulated power"] == "The device's power was simulated."
    assert "ina226 gave no energy for at least one window" in reasons["broken sensor"]
    assert all(row["figures"]["fps_per_watt"]["value"] is None for row in rows[1:])
    assert [rank for rank, _ in ranks(service, metric="latency")] == [1, 1, 1, 4]


def test_a_run_of_few_inferences_has_no_median_and_says_so(service: Served, enter: Enter) -> None:
    latency = {"count": 5, "min": 9_000_000, "p50": None, "p90": None, "p99": None}
    enter("slow", a_report(9_000_000, latency_us=latency))
    (row,) = board(service)["rows"]
    assert (row["rank"], row["figures"]["latency"]["value"]) == (None, None)
    assert row["figures"]["latency"]["reason"] == "5 inferences are too few for a median."
    assert ranks(service, metric="fps") == [(1, "slow")]


def test_the_cost_follows_from_the_price_the_lifetime_and_the_energy(service: Served, enter: Enter) -> None:
    enter("one", a_report(100_000, watts=0.5))

    def cost(**query: Any) -> float:
        found = page(service, metric="cost", **query)
        value: float = found["boards"][0]["rows"][0]["figures"]["cost"]["value"]
        return value

    device = 8.0 / (3 * SECONDS_PER_YEAR * 10)
    assert cost(price=8) == pytest.approx(device)
    assert cost(price=8, lifetime_years=1) == pytest.approx(3 * device)
    assert cost(price=8, price_per_kwh=0.36) == pytest.approx(device + 0.36 * 0.05 / 3.6e6)
    assert page(service, price=8)["cost"] == {"price": 8.0, "price_per_kwh": None, "lifetime_years": 3.0}


def test_pages_continue_the_ranks(service: Served, enter: Enter) -> None:
    for n in range(5):
        enter(f"device {n}", a_report(100_000 + 20_000 * (n // 2), spread_us=1_000))
    found, path = [], "/v1/edge/leaderboard?limit=2"
    while path:
        answer = service.client.get(path)
        (shown,) = answer.json()["boards"]
        assert shown["row_count"] == 5
        found += [(row["rank"], row["device"]) for row in shown["rows"]]
        path = answer.links.get("next", {}).get("url", "")
    assert [rank for rank, _ in found] == [1, 1, 3, 3, 5]
    assert sorted(name for _, name in found) == [f"device {n}" for n in range(5)]


@pytest.mark.parametrize(
    ("query", "close"),
    [
        ({"model": "c" * 64}, MODEL),
        ({"board": "esp32s3-n16r9"}, BOARD),
        ({"metric": "fps_per_wat"}, "fps_per_watt"),
    ],
)
def test_an_unknown_filter_is_refused_with_what_is_known(
    service: Served, enter: Enter, query: dict[str, str], close: str
) -> None:
    enter("one", a_report())
    answer = service.client.get("/v1/edge/leaderboard", params=query)
    assert answer.status_code == 422
    (entry,) = answer.json()["errors"]
    assert entry["field"] == next(iter(query))
    assert close in entry["valid"]


@pytest.mark.parametrize(
    "query",
    [
        {"price": "0"}, {"price": "nan"}, {"price": "1e400"}, {"price_per_kwh": "-0.1"}, {"lifetime_years": "1000"},
        {"limit": "0"}, {"cursor": "WyJhIiwgImIiLCAiYyIsIDEsIDEuMCwgImQiXQ"}, {"format": "xml"},
    ],
)  # fmt: skip
def test_an_absurd_parameter_is_refused(any_service: Served, query: dict[str, str]) -> None:
    answer = any_service.client.get("/v1/edge/leaderboard", params=query)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")


@pytest.fixture
def beside(service: Served, enter: Enter) -> Served:
    """A device, and workers: the same file, the same network, another head, another width, no energy."""
    same = NetworkFacts(family="mobilenet_v2", alpha="0.35", input=(96, 96, 3), classes=10)
    wider = same.model_copy(update={"alpha": None})
    head = same.model_copy(update={"classes": 1000})
    gpu: dict[str, Any] = {"hardware": "1x NVIDIA GeForce RTX 5090 32 GiB", "device": DeviceKind.CUDA}
    results = [
        a_classification(6000, 30, backend="litert", network=same, weight_hash=MODEL, index=0, size=0),
        a_classification(125, 100, network=same, index=1, size=1, **gpu),
        a_classification(500, 50, network=head, index=2, size=2),
        a_classification(900, None, network=same, index=3, size=3),
        a_classification(700, 50, network=wider, index=4, size=4),
        a_classification(800, 50, network=None, index=5, size=5),
    ]
    with service.database.write() as session:
        known(session, a_manifest())
    service.submit()
    service.finish(service.claim(), *results)
    enter("one", a_report(100_000, watts=0.5))
    return service


def test_workers_of_the_same_network_stand_beside_by_energy_per_inference(beside: Served) -> None:
    found = board(beside)
    assert found["network"] == {
        "family": "mobilenet_v2",
        "alpha": "0.35",
        "input": [96, 96, 3],
        "classes": 10,
    }
    rows = found["workers"]
    assert [(row["likeness"], row["backend"]) for row in rows] == [
        ("file", "litert"),
        ("body", "torch"),
        ("network", "torch"),
        ("network", "torch"),
    ]
    energies = [row["energy_per_inference_j"] for row in rows]
    assert energies[:3] == [pytest.approx(value) for value in (30 / 6000, 50 / 500, 100 / 125)]
    assert [row["fps_per_watt"] for row in rows[:3]] == [pytest.approx(1 / value) for value in energies[:3]]
    assert (energies[3], rows[3]["reason"]) == (None, "not measured")
    first = rows[0]
    assert (first["energy_source"], first["energy_scope"]) == ("RAPL package", "the CPU alone")
    assert first["energy_above_idle_j"] == pytest.approx(15 / 6000)
    assert found["rows"][0]["rank"] == 1, "workers are not ranked with devices"


def test_csv_has_devices_and_workers_in_si_units(beside: Served) -> None:
    answer = beside.client.get("/v1/edge/leaderboard", headers={"Accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    records = list(csv.DictReader(io.StringIO(answer.text)))
    assert [record["kind"] for record in records] == ["device", *["worker"] * 4]
    device, worker = records[:2]
    assert (device["rank"], device["device"], device["model_sha256"]) == ("1", "one", MODEL)
    assert float(device["latency"]) == 0.1
    assert float(device["fps_per_watt"]) == pytest.approx(20)
    assert float(device["energy_high"]) == pytest.approx(0.05)
    assert (worker["backend"], worker["likeness"], worker["rank"]) == ("litert", "file", "")
    assert float(worker["energy"]) == pytest.approx(0.005)


def test_a_signed_report_that_the_service_believes_stands_on_the_board(service: Served) -> None:
    service.client.post("/v1/edge/models", json=device_client.manifest())
    device = device_client.enrolled(service.client, service.database, name="signed")
    slow, fast = begun(service, device), begun(service, device)
    assert judged(device, device_client.report(1, slow)) == ("accepted", True, [])
    wrong = device_client.report(2, fast) | {"golden": None}
    assert judged(device, wrong)[:2] == ("quarantined", False)
    found = board(service, metric="fps_per_watt")
    assert [(row["rank"], row["device"]) for row in found["rows"]] == [(1, "signed")]
    # 640 inferences in five windows of 5.124 J
    assert found["rows"][0]["figures"]["fps_per_watt"]["value"] == pytest.approx(640 / (5 * 5.124))
    assert (found["not_ranked"], found["network"]["alpha"]) == ({"golden_failed": 1}, "0.35")


def test_the_client_reads_every_board(service: Served, enter: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_boards, "BOARDS", 2)
    for n in range(3):
        enter("one", a_report(100_000, sequence=n + 1, model_sha256=str(n) * 64))
    with Client(service.url) as client:
        found = list(client.edge_boards(metric="fps"))
        assert len(edge_grids(client.edge_leaderboard(metric="fps"))) == 2
    assert [each.model_sha256[0] for each in found] == ["2", "1", "0"]
