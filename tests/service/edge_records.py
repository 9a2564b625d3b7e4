"""Small, valid devices, reports, manifests and results of image classifiers to store. Nothing here was measured."""

from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks import signing_device
from optigpu.documents.devices import DeviceReport, DeviceSource, Reason, ReportState
from optigpu.documents.facts import EnergyFacts, NetworkFacts, RunFacts, WeightFacts
from optigpu.documents.manifest import ModelManifest
from optigpu.documents.result import Result
from optigpu.store import device_reports, devices, edge_figures
from optigpu.store.database import Session
from optigpu.store.device_reports import JudgedReport
from optigpu.store.devices import DeviceRequest, NewDevice
from optigpu.vocabulary import new_id
from tests.service.records import a_metric, a_result

MODEL, OTHER_MODEL = "a" * 64, "b" * 64
FIRMWARE = "f" * 64
BOARD = "esp32s3-n16r8"
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
NETWORK = {"family": "mobilenet_v2", "alpha": "0.35", "input": [96, 96, 3], "classes": 10}
WINDOW_US = 10_000_000


def a_device(session: Session, name: str | None = None, source: DeviceSource = DeviceSource.DEVICE) -> str:
    """Enrols a device and returns its id."""
    device = NewDevice(name=name, board=BOARD, source=source, firmware_sha256=FIRMWARE, secret=b"k" * 32)
    return devices.enrol(session, device, NOON)


def a_window(latency_us: int, watts: float | None = 0.5) -> dict[str, Any]:
    """About 10 s of inferences of that latency, at that power."""
    count = max(1, WINDOW_US // latency_us)
    total = count * latency_us
    return {"count": count, "total_us": total, "energy_uj": None if watts is None else round(total * watts)}


def a_report(
    median_us: int = 100_000,
    *,
    watts: float | None = 0.5,
    spread_us: int = 0,
    windows: int = 5,
    **changes: Any,
) -> DeviceReport:
    """A run whose windows have latencies from `median_us` up to `spread_us` more."""
    steps = max(windows - 1, 1)
    made = [a_window(median_us + spread_us * n // steps, watts) for n in range(windows)]
    count = sum(window["count"] for window in made)
    document: dict[str, Any] = signing_device.report("00c0ffee00c0ffee", 1) | {
        "run_id": new_id(),
        "model_sha256": MODEL,
        "board": BOARD,
        "firmware_sha256": FIRMWARE,
        "windows": made,
        "latency_us": {"count": count, "min": median_us, "p50": median_us, "p90": None, "p99": None},
        "power": {"source": "none" if watts is None else "ina226", "idle_uw": None},
        "golden": None,
        "started_us": 0,
    }
    return DeviceReport.model_validate(document | changes)


def stored(
    session: Session,
    device_id: str,
    report: DeviceReport,
    *reasons: Reason,
    flags: tuple[Any, ...] = (),
    minute: int = 0,
) -> str:
    """Stores a report as the service would that found these reasons, and returns its id."""
    request = DeviceRequest(
        device_id=device_id,
        key_version=1,
        boot_id=report.boot_id,
        sequence=report.sequence,
        firmware_sha256=report.firmware_sha256,
        clock_synchronised=True,
        received_at=NOON + timedelta(minutes=minute),
    )
    quarantined = any(reason.quarantines for reason in reasons)
    judged = JudgedReport(
        report=report,
        source=DeviceSource.SIMULATOR if Reason.SIMULATOR in reasons else DeviceSource.DEVICE,
        state=ReportState.QUARANTINED if quarantined else ReportState.ACCEPTED,
        ranked=not reasons,
        reasons=reasons,
        flags=flags,
    )
    answer = device_reports.add(session, request, judged)
    assert answer.report_id is not None
    return answer.report_id


def a_manifest(sha256: str = MODEL, **network: Any) -> ModelManifest:
    changes = {"sha256": sha256, "network": NETWORK | network}
    return ModelManifest.model_validate(signing_device.manifest() | changes)


def known(session: Session, manifest: ModelManifest) -> None:
    """Enters a model."""
    edge_figures.add(session, manifest)


def a_classification(
    images_per_s: float,
    watts: float | None,
    *,
    backend: str = "torch",
    network: NetworkFacts | None = None,
    weight_hash: str | None = None,
    **changes: Any,
) -> Result:
    """A worker's result of an image classifier; without `watts` its energy was not measured."""
    metrics = {
        "images_per_s": a_metric("images_per_s", images_per_s, (images_per_s * 0.99, images_per_s * 1.01)),
        "power_w": a_metric("power_w", watts),
        "j_per_image": a_metric("j_per_image", watts and 0.5 * watts / images_per_s),
    }
    counts: dict[str, Any] = dict.fromkeys(
        ("looks", "changes", "requests", "window_s", "idle_w", "idle_s"), 9
    )
    energy = EnergyFacts(source="RAPL package", scope="the CPU alone", resolution_j=None, **counts)
    weights = WeightFacts(hash=weight_hash, hash_of="files") if weight_hash else None
    facts = RunFacts(network=network, weights=weights, energy=energy if watts else None)
    result = a_result(metrics, workload="classify", model="preset:mobilenet-v2", facts=facts, **changes)
    variant = result.variant.model_copy(
        update={
            "backend": backend,
            "primary_metric": "images_per_s",
            "workload": {"kind": "classify", "batch_size": 1, "image_size": None},
        }
    )
    return result.model_copy(update={"variant": variant})
