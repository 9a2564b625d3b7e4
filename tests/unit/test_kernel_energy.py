"""Energy of AMD's and Intel's GPUs from made-up files, after the kernel's documentation: no machine wrote them."""

from pathlib import Path

import pytest

from optigpu.hardware.kernel_energy import kernel_energy
from optigpu.hardware.sensors import SensorError
from optigpu.vocabulary import DeviceKind
from tests.engine.trees import tree

HWMON = "sys__class__drm__{}__device__hwmon__hwmon{}__{}"


def card(root: Path, monitor: str, files: dict[str, str], number: int = 0, connector: str = "") -> Path:
    """A card with a monitor of that name, and the files of it; returns the monitor's folder."""
    named = {"name": f"{monitor}\n"} | files
    paths = {HWMON.format(f"card{number}{connector}", number, name): text for name, text in named.items()}
    return tree(root, **paths) / f"sys/class/drm/card{number}{connector}/device/hwmon/hwmon{number}"


def test_an_amd_gpu_s_power_is_integrated(tmp_path: Path) -> None:
    folder = card(tmp_path, "amdgpu", {"power1_average": "150000000\n"})
    sensor = kernel_energy(DeviceKind.ROCM, tmp_path)
    assert (sensor.source, sensor.least_hz) == ("amdgpu's power1_average, integrated", 10.0)
    (folder / "power1_average").write_text("250000000\n")
    sensor.look()
    assert sensor.total.watts == pytest.approx(200)


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_an_intel_gpu_s_counter_is_in_microjoules(tmp_path: Path, driver: str) -> None:
    folder = card(tmp_path, driver, {"energy1_input": "5000000\n"})
    card(tmp_path, "nvme", {"energy1_input": "7\n"}, number=1)
    sensor = kernel_energy(DeviceKind.XPU, tmp_path)
    assert sensor.source == f"{driver}'s energy1_input"
    (folder / "energy1_input").write_text("5750000\n")
    sensor.look()
    assert sensor.total.joules == pytest.approx(0.75)


def test_of_several_gpus_none_is_taken(tmp_path: Path) -> None:
    for number in range(2):
        card(tmp_path, "amdgpu", {"power1_average": "1\n"}, number)
    with pytest.raises(
        SensorError, match="energy of 2 AMD GPUs, and not which of them torch uses; connect a wall"
    ):
        kernel_energy(DeviceKind.ROCM, tmp_path)


@pytest.mark.parametrize(
    ("device", "files", "words"),
    [
        (DeviceKind.ROCM, {}, "no energy of an AMD GPU \\(no power1_average in"),
        (DeviceKind.ROCM, {"energy1_input": "1\n"}, "no power1_average in"),
        (DeviceKind.ROCM, {"power1_average": "N/A\n"}, "power1_average holds no number"),
        (DeviceKind.XPU, {"power1_average": "1\n"}, "no energy1_input in"),
        (DeviceKind.MPS, {"power1_average": "1\n"}, "macOS tells what it draws to administrators alone"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    tmp_path: Path, device: DeviceKind, files: dict[str, str], words: str
) -> None:
    card(tmp_path, "amdgpu", files)
    with pytest.raises(SensorError, match=words):
        kernel_energy(device, tmp_path)
