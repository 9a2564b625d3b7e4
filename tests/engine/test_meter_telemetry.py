"""Clocks, heat, power and load while requests run: a CPU's as the kernel shows them, a GPU's through NVML."""

import json
import os
import time
from pathlib import Path

import pytest

from optigpu.meters.telemetry import MOST_SERIES_POINTS, Probes, Series, TelemetryMeter
from tests.drivers.nvml import ask, build
from tests.engine.meter_contexts import doing, fail, tickers
from tests.engine.trees import tree

CPU = "sys__devices__system__cpu__cpu{}__{}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def machine(root: Path) -> Path:
    """A host that shows everything; its package draws nothing."""
    for number in os.sched_getaffinity(0):
        tree(root, **{CPU.format(number, "cpufreq__scaling_cur_freq"): "3000000\n"})
        tree(root, **{CPU.format(number, "thermal_throttle__core_throttle_count"): "2\n"})
    return tree(
        root,
        proc__loadavg="1.50 1.0 0.5 1/100 1\n",
        sys__class__thermal__thermal_zone0__type="x86_pkg_temp\n",
        sys__class__thermal__thermal_zone0__temp="61500\n",
        **{
            "sys__class__powercap__intel-rapl:0__name": "package-0\n",
            "sys__class__powercap__intel-rapl:0__energy_uj": "5\n",
            "sys__class__powercap__intel-rapl:0__max_energy_range_uj": "100\n",
        },
    )


@pytest.mark.slow
def test_the_cpu_s_series_are_in_si_units_and_kept_as_a_file(tmp_path: Path) -> None:
    root = machine(tmp_path / "root")
    heat = root / "sys/class/thermal/thermal_zone0/temp"

    def get_warmer() -> None:
        time.sleep(0.15)
        warmer = heat.with_name("warmer")  # the sensor is read meanwhile and must never be found empty
        warmer.write_text("80000\n")
        warmer.replace(heat)

    context, request = doing(tmp_path, get_warmer)
    reading = TelemetryMeter(window_s=0.5, root=root).read(context)
    facts = reading.facts.model_dump()["recorded"]["telemetry"]
    series = facts["series"]
    assert series["cpu_clock_hz"] == {"least": 3e9, "mean": 3e9, "most": 3e9}
    temperature = series["cpu_temperature_c.0.x86_pkg_temp"]
    assert (temperature["least"], temperature["most"]) == (61.5, 80.0)
    assert 61.5 < temperature["mean"] < 80.0
    assert series["cpu_power_w"]["most"] == 0.0
    assert series["cpu_heat_slowdowns"]["least"] == 2.0 * len(os.sched_getaffinity(0))
    assert series["load_1min"]["mean"] == 1.5
    assert (facts["reasons"], facts["requests"]) == ({}, request.runs)
    document = json.loads(reading.artifacts["telemetry.json"].read_text())
    assert reading.artifacts["telemetry.json"].is_relative_to(tmp_path / "artifacts")
    assert {len(values) for values in document["series"].values()} == {facts["looks"]}
    assert document["t_s"] == sorted(document["t_s"])


def test_what_a_machine_does_not_show_is_null_with_its_reason(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    context, _ = doing(tmp_path, lambda: None)
    facts = TelemetryMeter(window_s=0.01, root=root).read(context).facts.model_dump()["recorded"]["telemetry"]
    assert facts["series"] == {}
    assert set(facts["reasons"]) == {
        "cpu_clock_hz",
        "cpu_temperature_c",
        "cpu_power_w",
        "cpu_heat_slowdowns",
        "load_1min",
    }


@pytest.mark.slow
def test_a_sensor_that_vanishes_is_null_from_then_on_and_spares_the_others(tmp_path: Path) -> None:
    root = machine(tmp_path / "root")

    def unplug() -> None:
        time.sleep(0.3)
        (root / "sys/class/thermal/thermal_zone0/temp").unlink(missing_ok=True)

    context, _ = doing(tmp_path, unplug)
    reading = TelemetryMeter(window_s=0.6, root=root).read(context)
    document = json.loads(reading.artifacts["telemetry.json"].read_text())
    values = document["series"]["cpu_temperature_c.0.x86_pkg_temp"]
    assert (values[0], values[-1]) == (61.5, None)
    assert "cannot be read" in document["reasons"]["cpu_temperature_c.0.x86_pkg_temp"]
    assert document["series"]["load_1min"][-1] == 1.5


def test_a_long_series_is_thinned_and_its_extremes_are_not(tmp_path: Path) -> None:
    values = iter([5.0] * 501 + [90.0] + [5.0] * 500)
    series = Series(Probes({"x": lambda: next(values)}))
    for _ in range(1001):
        series.look()
    document = series.document()
    assert len(document["series"]["x"]) == len(document["t_s"]) <= MOST_SERIES_POINTS
    assert (document["every"], series.summary()["looks"]) == (4, 1001)
    assert series.summary()["series"]["x"]["most"] == 90.0


@pytest.mark.slow
def test_a_gpu_s_series_through_nvml(library: Path) -> None:
    reading = ask(library, "telemetry")
    series = reading["facts"]["recorded"]["telemetry"]["series"]
    assert series["gpu_sm_clock_hz"]["mean"] == 1.5e9
    assert series["gpu_temperature_c"]["mean"] == 55.0
    assert series["gpu_power_w"]["most"] == 310.0
    assert series["gpu_slowdown_hw_thermal_slowdown"]["least"] == 1.0
    assert series["gpu_slowdown_hw_slowdown"]["most"] == 0.0
    assert "load_1min" in series, "the host launches the work"
    assert reading["threads"] == ["MainThread"]


@pytest.mark.slow
def test_a_gpu_that_is_lost_in_mid_run_keeps_what_was_seen(library: Path) -> None:
    reading = ask(library, "telemetry", "lost", after=6)
    document = reading["artifacts"]["telemetry.json"]
    powers = document["series"]["gpu_power_w"]
    assert powers[0] is not None
    assert powers[-1] is None
    assert "The GPU is lost" in document["reasons"]["gpu_power_w"]
    assert document["series"]["load_1min"][-1] is not None


@pytest.mark.slow
def test_a_gpu_that_cannot_be_asked_leaves_the_host_s_series(library: Path) -> None:
    facts = ask(library, "telemetry", "not_loaded")["facts"]["recorded"]["telemetry"]
    assert "driver is not loaded" in facts["reasons"]["gpu"]
    assert "load_1min" in facts["series"]


def test_a_request_that_breaks_down_leaves_no_thread_behind(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, fail)
    with pytest.raises(ZeroDivisionError):
        TelemetryMeter(root=tmp_path).read(context)
    assert tickers() == 0
