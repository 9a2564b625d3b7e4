"""The catalog of published peaks: complete, consistent with itself, and found by exact names alone."""

import subprocess
import sys

import pytest

from optigpu.hardware.catalog import (
    Capability,
    Device,
    Dtype,
    HardwareKind,
    capabilities,
    devices,
    find,
    find_class,
)

NAMES = [name for device in devices() for name in (device.name, *device.aliases)]
BOTH = [
    (device, dtype)
    for device in devices()
    for dtype in sorted(device.published_flop_per_s.keys() & device.derived_flop_per_s())
]


def known(name: str) -> Device:
    """A device that must be there."""
    device = find(name)
    assert device is not None, name
    return device


def test_no_two_devices_share_a_name() -> None:
    assert [find(name) for name in NAMES] == [
        device for device in devices() for _ in (device.name, *device.aliases)
    ]
    assert len({name.casefold() for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "RTX", "GeForce", "NVIDIA A100", "NVIDIA L40 S", "Apple M", "", "5090"]
)
def test_a_part_of_a_name_and_a_neighbour_of_it_find_nothing(name: str) -> None:
    assert find(name) is None


def test_case_trade_marks_and_spaces_tell_no_devices_apart() -> None:
    assert find("intel(R)  Xeon(R) Platinum 8480+") is known("Intel Xeon Platinum 8480+")


@pytest.mark.parametrize(
    ("hardware_class", "name"),
    [
        ("1x NVIDIA H200 140 GiB", "NVIDIA H200"),
        ("8x NVIDIA H100 80GB HBM3 80 GiB", "NVIDIA H100 SXM"),
        ("1x NVIDIA GeForce RTX 4060 Laptop GPU 8 GiB", "NVIDIA GeForce RTX 4060 Laptop GPU"),
        ("AMD EPYC 7763 64 cores", "AMD EPYC 7763"),
        ("AMD EPYC 7763 1 core", "AMD EPYC 7763"),
    ],
)
def test_a_class_of_hardware_is_found(hardware_class: str, name: str) -> None:
    device = find_class(hardware_class)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize(
    "hardware_class", ["", "1x Tesla T4 15 GiB + 1x NVIDIA L4 22 GiB", "Intel Xeon 2 cores"]
)
def test_a_mixed_or_unknown_class_of_hardware_is_not(hardware_class: str) -> None:
    assert find_class(hardware_class) is None


@pytest.mark.parametrize(("device", "dtype"), BOTH, ids=lambda value: getattr(value, "name", value))
def test_a_published_peak_is_what_units_and_clock_give(device: Device, dtype: Dtype) -> None:
    derived, published = device.derived_flop_per_s(), device.published_flop_per_s
    assert derived[dtype] == pytest.approx(published[dtype], rel=0.015)


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_a_device_has_a_source_a_peak_or_a_bandwidth_and_faster_narrow_types(device: Device) -> None:
    assert device.source
    assert device.peak_flop_per_s or device.memory_bandwidth_bytes_per_s
    peaks = device.peak_flop_per_s
    halved: tuple[tuple[Dtype, Dtype], ...] = (
        ("fp32", "fp16"),
        ("fp16", "int8"),
        ("bf16", "int8"),
        ("fp16", "fp8"),
        ("int8", "int4"),
    )
    for wide, narrow in halved:
        if wide in peaks and narrow in peaks:
            assert 0.99 <= peaks[narrow] / peaks[wide] <= 20
    if device.kind is HardwareKind.GPU:
        assert device.memory_bytes
        assert device.tdp_w
        assert device.memory_bytes % 2**29 == 0


def test_a_peak_that_is_published_nowhere_comes_from_units_and_clock() -> None:
    esp = known("ESP32-S3")
    assert esp.published_flop_per_s == {}
    # 2 cores x 240 MHz x 16 multiply-accumulates
    assert esp.peak_flop_per_s["int8"] / 2 == pytest.approx(7.68e9)
    # performance and efficiency cores together
    assert known("i9-13900K").peak_flop_per_s["fp32"] == pytest.approx(8 * 5.8e9 * 32 + 16 * 4.3e9 * 16)


def test_reading_the_catalog_loads_nothing_heavy() -> None:
    heavy = {"numpy", "torch", "transformers", "httpx", "rich"}
    code = (
        "import sys; from optigpu.hardware.catalog import find; from optigpu.claims import baselines; baselines();"
        f"find('T4'); print(sorted({heavy!r} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_nvidia_card_has_the_limits_of_one_capability() -> None:
    cards = [card for each in capabilities() for card in each.cards]
    gpus = [device.name for device in devices() if device.kind is HardwareKind.GPU]
    assert {name for name in gpus if name.startswith("NVIDIA")} <= set(cards)
    assert len(set(cards)) == len(cards)


@pytest.mark.parametrize("capability", capabilities(), ids=lambda capability: capability.name)
def test_the_limits_of_a_capability_fit_together(capability: Capability) -> None:
    assert capability.name == f"sm_{''.join(map(str, capability.parts))}"
    reserved = capability.reserved_bytes_per_block
    assert capability.shared_bytes_per_block + reserved == capability.shared_bytes
    assert reserved == (1024 if capability.parts >= (8, 0) else 0)
    assert capability.threads % 512 == 0
    assert capability.threads >= capability.threads_per_block
    assert capability.threads / capability.blocks <= 96
    first = find(capability.cards[0])
    assert first is None or first.blocks[0].units == capability.multiprocessors
