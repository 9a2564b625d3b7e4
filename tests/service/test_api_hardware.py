"""`GET /v1/hardware`: the classes that serve, the catalog of peaks, and which living workers have what."""

from datetime import timedelta
from typing import Any

import pytest

from optigpu.hardware.catalog import devices
from optigpu.store import workers
from optigpu.vocabulary import utc_now
from tests.service.records import a_gpu_worker, a_worker
from tests.service.serving import Served, serving


def hardware(service: Served) -> dict[str, Any]:
    """What the service answers."""
    answer = service.client.get("/v1/hardware")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def served(service: Served) -> dict[str, list[str]]:
    """Each device of the catalog that a worker serves, with its workers."""
    return {entry["name"]: entry["served_by"] for entry in hardware(service)["catalog"] if entry["served_by"]}


def test_the_catalog_is_whole_even_where_nobody_serves(service: Served) -> None:
    answer = hardware(service)
    assert answer["hardware"] == []
    assert [entry["name"] for entry in answer["catalog"]] == [device.name for device in devices()]
    assert served(service) == {}


def test_an_entry_has_peaks_in_si_units_and_null_for_what_is_not_published(any_service: Served) -> None:
    entries = {entry["name"]: entry for entry in hardware(any_service)["catalog"]}
    card, chip = entries["NVIDIA GeForce RTX 4090"], entries["ESP32-S3"]
    assert card["peak_flop_per_s"]["fp16"] == 165.2e12
    assert card["memory_bandwidth_bytes_per_s"] == 1008e9
    assert card["memory_bytes"] == 24 * 2**30
    assert "Ada whitepaper" in card["source"]
    assert chip["peak_flop_per_s"] == {"int8": pytest.approx(15.36e9)}
    assert (chip["memory_bandwidth_bytes_per_s"], chip["tdp_w"], chip["price_usd"]) == (None, None, None)


def test_living_workers_are_named_with_what_they_have(service: Served) -> None:
    with service.database.write() as session:
        workers.register(session, a_worker("cpu", hardware_class="AMD EPYC 9654 96 cores"))
        workers.register(session, a_gpu_worker("two", gpus=("NVIDIA H200", "NVIDIA H200")))
        workers.register(session, a_gpu_worker("mixed", gpus=("NVIDIA H200", "NVIDIA L4", "NVIDIA A10G")))
        workers.register(session, a_gpu_worker("gone"), now=utc_now() - timedelta(hours=1))
    found = served(service)
    assert {name: sorted(ids) for name, ids in found.items()} == {
        "AMD EPYC 9654": ["cpu"],
        "NVIDIA H200": ["mixed", "two"],
        "NVIDIA L4": ["mixed"],
    }


def test_a_gpu_worker_does_not_serve_its_host_s_cpu(service: Served) -> None:
    with service.database.write() as session:
        workers.register(
            session, a_gpu_worker("w", hardware_class="AMD EPYC 9654 96 cores", gpus=("NVIDIA L4",))
        )
    assert served(service) == {"NVIDIA L4": ["w"]}


def test_it_needs_a_key_where_keys_are_needed(tmp_path: Any) -> None:
    with serving(
        f"sqlite:///{tmp_path / 'optigpu.db'}", api_key="a-first-key-that-is-long-enough"
    ) as guarded:
        assert guarded.client.get("/v1/hardware").status_code == 401
