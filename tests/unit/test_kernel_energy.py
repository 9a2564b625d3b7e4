"""Energy through files as the kernel shows them, of CPUs and of AMD's and Intel's GPUs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.hardware.energy import (
    PLAUSIBLE_W,
    SLACK_S,
    CounterFlow,
    PowerFlow,
    cpu_energy,
    energy_domains,
    kernel_energy,
)
from optigpu.hardware.sensors import SensorError
from optigpu.vocabulary import DeviceKind
from tests.drivers.nvml import ask, build
from tests.engine.machines import tree

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


RANGE_UJ = 262_143_328_850
"""Of an Intel server's package."""


def zone(root: Path, name: str, kind: str, energy_uj: int | str = 0, range_uj: int = RANGE_UJ) -> Path:
    """A power zone; the kernel shows all of them side by side."""
    folder = root / "sys/class/powercap" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in (("name", kind), ("energy_uj", energy_uj), ("max_energy_range_uj", range_uj)):
        (folder / file).write_text(f"{text}\n")
    return folder


def server(root: Path) -> None:
    """Two sockets with their memory, the parts of a package, the platform, and the packages once more."""
    for socket in (0, 1):
        zone(root, f"intel-rapl:{socket}", f"package-{socket}", energy_uj=5_000_000)
        zone(root, f"intel-rapl:{socket}:0", "core", energy_uj=1)
        zone(root, f"intel-rapl:{socket}:1", "dram", energy_uj=7_000_000, range_uj=65_712_999_613)
    zone(root, "intel-rapl:2", "psys")
    zone(root, "intel-rapl-mmio:0", "package-0")
    (root / "sys/class/powercap/intel-rapl").mkdir()


def test_packages_and_their_memory_count_and_nothing_twice(tmp_path: Path) -> None:
    server(tmp_path)
    found = [(name, folder.name) for name, folder in energy_domains(tmp_path)]
    assert found == [
        ("package-0", "intel-rapl:0"),
        ("package-0 dram", "intel-rapl:0:1"),
        ("package-1", "intel-rapl:1"),
        ("package-1 dram", "intel-rapl:1:1"),
    ]


def test_a_platform_counter_alone_is_no_counter_of_the_cpu(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "psys")
    with pytest.raises(SensorError, match="no RAPL package"):
        energy_domains(tmp_path)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    with pytest.raises(SensorError, match="like most virtual machines"):
        cpu_energy(tmp_path)


def test_a_counter_for_root_alone_is_a_reason(tmp_path: Path) -> None:
    """The kernel's own file stands in: no user can read it, not even root."""
    folder = zone(tmp_path, "intel-rapl:0", "package-0")
    (folder / "energy_uj").unlink()
    (folder / "energy_uj").symlink_to("/proc/sys/vm/drop_caches")
    with pytest.raises(SensorError, match="Only root may read"):
        cpu_energy(tmp_path)


@pytest.mark.parametrize("text", ["", "many", "-5"])
def test_a_counter_that_holds_no_number_is_a_reason(tmp_path: Path, text: str) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", energy_uj=text)
    with pytest.raises(SensorError, match="which is not a number"):
        cpu_energy(tmp_path)


def test_the_domains_are_summed(tmp_path: Path) -> None:
    server(tmp_path)
    sensor = cpu_energy(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", energy_uj=6_000_000)
    zone(tmp_path, "intel-rapl:1:1", "dram", energy_uj=7_500_000, range_uj=65_712_999_613)
    sensor.look()
    assert sensor.total.joules == pytest.approx(1.5)
    assert (sensor.total.looks, sensor.total.changes) == (1, 1)


@given(st.lists(st.integers(0, 4_000_000_000), min_size=1, max_size=20), st.integers(0, RANGE_UJ))
def test_a_wrap_loses_nothing(steps_uj: list[int], start_uj: int) -> None:
    shown = [start_uj]
    flow = CounterFlow("p", lambda: shown[-1] / 1e6, RANGE_UJ / 1e6)
    total = 0.0
    for step in steps_uj:
        shown.append((shown[-1] + step) % RANGE_UJ)
        total += flow.since(elapsed_s=1.0)
    assert total == pytest.approx(sum(steps_uj) / 1e6, abs=1e-3)


def test_a_counter_that_is_reset_is_no_wrap() -> None:
    shown = [100_000.0, 0.0]
    flow = CounterFlow("p", lambda: shown.pop(0), RANGE_UJ / 1e6)
    with pytest.raises(SensorError, match=r"jumped from 100000\.000 to 0\.000 J"):
        flow.since(elapsed_s=1.0)


def test_a_counter_without_wrap_never_falls() -> None:
    shown = [5.0, 4.0]
    with pytest.raises(SensorError, match=r"fell from 5\.000 to 4\.000 J"):
        CounterFlow("p", lambda: shown.pop(0)).since(elapsed_s=1.0)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_jump_is_more_than_any_machine_draws(factor: float) -> None:
    shown = [0.0, factor * PLAUSIBLE_W * (2 + SLACK_S)]
    flow = CounterFlow("p", lambda: shown.pop(0))
    if factor < 1:
        assert flow.since(elapsed_s=2.0) > 0
    else:
        with pytest.raises(SensorError, match="jumped"):
            flow.since(elapsed_s=2.0)


def test_power_is_integrated_by_the_trapezoidal_rule() -> None:
    shown = [10.0, 20.0, 40.0]
    flow = PowerFlow(lambda: shown.pop(0))
    assert (flow.since(2.0), flow.since(1.0)) == (30.0, 30.0)


# ---- NVML, through its real bindings and a driver library for a GPU that is not there.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.mark.slow
def test_readings_are_in_si_units(library: Path) -> None:
    readings = ask(library, "readings")
    assert readings["energy_j"] == pytest.approx(1e6, abs=100)
    exact = {
        "name": "NVIDIA Made-up",
        "uuid": "GPU-made-up",
        "compute_capability": "9.0",
        "memory_bytes": 8 * 2**30,
        "free_bytes": 6 * 2**30,
        "power_w": 10.0,
        "power_limit_w": 700.0,
        "utilization": 0.0,
        "sm_clock_hz": 1.5e9,
        "memory_clock_hz": 2.6e9,
        "temperature_c": 55.0,
        "slowdowns": ["sw_power_cap", "hw_thermal_slowdown"],
        "compute_pids": [4242],
    }
    assert exact.items() <= readings.items()


@pytest.mark.slow
def test_what_is_refused_is_a_sentence_and_the_rest_is_read(library: Path) -> None:
    readings = ask(library, "readings", "refuses")
    assert readings["energy_j"].startswith("The NVIDIA driver does not let this user read its energy counter")
    assert readings["temperature_c"] == 55.0


@pytest.mark.slow
def test_a_gpu_that_is_lost_meanwhile_is_a_sentence_from_then_on(library: Path) -> None:
    readings = ask(library, "readings", "lost", after=1)
    assert readings["energy_j"] > 0, "the first look"
    for name in ("power_w", "utilization", "temperature_c", "sm_clock_hz"):
        assert readings[name].startswith("The GPU is lost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sentence"),
    [("not_loaded", "The NVIDIA driver is not loaded"), ("lost", "The GPU is lost")],
)
def test_a_driver_that_cannot_be_asked_at_all_is_a_sentence(library: Path, mode: str, sentence: str) -> None:
    after = -1  # lost from the first moment
    assert ask(library, "readings", mode, after)["error"].startswith(sentence)
    assert ask(library, "which", mode, after)["visible"] == 0


@pytest.mark.slow
def test_no_library_is_a_sentence() -> None:
    """On a machine that has a driver of its own, the readings are those of its GPU."""
    readings = ask(None, "readings")
    assert "uuid" in readings or "no NVIDIA driver library" in readings["error"]


@pytest.mark.slow
def test_a_job_runs_on_the_gpu_that_cuda_shows_first(library: Path) -> None:
    assert ask(library, "which", CUDA_VISIBLE_DEVICES="GPU-made")["uuid"] == "GPU-made-up"
    assert "CUDA_VISIBLE_DEVICES" in ask(library, "which", CUDA_VISIBLE_DEVICES="")["error"]


@pytest.mark.slow
def test_slices_stand_in_place_of_the_gpu_that_mig_divides(library: Path) -> None:
    *slices, of_the_job = ask(library, "slices", "mig", CUDA_VISIBLE_DEVICES="MIG-made-up-2")
    assert [told["uuid"] for told in slices] == ["MIG-made-up-0", "MIG-made-up-2"]
    assert of_the_job == slices[1]
    assert {told["name"] for told in slices} == {"NVIDIA Made-up MIG 1g.1gb"}
    assert of_the_job["memory_bytes"] == 2**30
    told, _ = slices
    assert (told["compute_capability"], told["sm_clock_hz"]) == ("9.0", 1.5e9), "that of its card"
    assert told["energy_j"] == (
        "A MIG slice does not report its energy counter: its GPU counts all slices together."
    )


@pytest.mark.slow
def test_the_probe_sees_slices(library: Path) -> None:
    assert ask(library, "which", "mig", CUDA_VISIBLE_DEVICES="MIG-made-up-0,MIG-made-up-2") == {
        "uuid": "MIG-made-up-0",
        "visible": 2,
    }
