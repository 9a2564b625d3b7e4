"""NVML through its real bindings and a driver library for a GPU that is not there."""

from pathlib import Path

import pytest

from tests.drivers.nvml import ask, build


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
