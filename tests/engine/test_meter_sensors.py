"""Energy, utilization and telemetry: a CPU's counters as the kernel shows them, a GPU's through real NVML bindings."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from optigpu.hardware.sensors import Ticker
from optigpu.meters.energy import EnergyMeter
from optigpu.meters.gpu_utilization import GpuUtilizationMeter
from optigpu.meters.telemetry import TelemetryMeter
from optigpu.workloads.generate import Generate
from optigpu.workloads.train_step import TrainStep
from tests.breadth import cases
from tests.drivers.nvml import ask, build
from tests.drivers.questions import REQUEST_J
from tests.engine.machines import tree
from tests.engine.meter_contexts import doing, fail, generating, tickers
from tests.engine.training import GPT2, RESNET, trained

IDLE_W = 20.0
RANGE_UJ = 262_143_328_850


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


class Package:
    """A CPU package under `root` that draws 20 W, and for each request 3 J more; it wraps soon after its start."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "sys/class/powercap/intel-rapl:0"
        self._folder.mkdir(parents=True)
        (self._folder / "name").write_text("package-0\n")
        (self._folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        self._at_s = time.perf_counter()
        self._idle_j = 0.0
        self._spent_j = 0.0
        self.watts = IDLE_W

    def show(self) -> None:
        """What the counter shows now, whole at any moment."""
        before_s, self._at_s = self._at_s, time.perf_counter()
        self._idle_j += self.watts * (self._at_s - before_s)
        joules = self._idle_j + self._spent_j
        fresh = self._folder / "fresh"
        fresh.write_text(f"{(RANGE_UJ - 10_000_000 + int(joules * 1e6)) % RANGE_UJ}\n")
        os.replace(fresh, self._folder / "energy_uj")

    def request(self) -> None:
        time.sleep(0.02)
        self._spent_j += REQUEST_J

    def vanish(self) -> None:
        """Unplugged in the middle of a request."""
        self.request()
        self._folder.rename(self._folder.with_name("gone"))


def meter(root: Path) -> EnergyMeter:
    return EnergyMeter(rest_s=0.0, idle_s=0.5, window_s=1.0, longest_s=3.0, root=root)


@pytest.mark.slow
def test_a_request_s_energy_is_what_it_draws_above_idle(tmp_path: Path) -> None:
    package = Package(tmp_path)
    context, request = doing(tmp_path, package.request, Generate(new_tokens=5, batch_size=2))
    with Ticker(package.show, 0.001):
        reading = meter(tmp_path).read(context)
    facts = reading.facts.model_dump()["energy"]
    assert facts["idle_w"] == pytest.approx(IDLE_W, rel=0.2)
    assert reading.values["energy_j"] == pytest.approx(REQUEST_J, rel=0.1)
    assert reading.values["j_per_token"] == pytest.approx(reading.values["energy_j"] / 10)
    drawn_j = reading.values["power_w"] * facts["window_s"]
    assert drawn_j == pytest.approx(
        facts["requests"] * reading.values["energy_j"] + facts["idle_w"] * facts["window_s"]
    )
    assert facts["requests"] == request.runs - 1, "one more raises the clocks"
    assert facts["window_s"] >= 1.0
    assert facts["source"] == "RAPL counters (powercap)"
    assert facts["scope"].startswith("package-0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "metric", "counted"),
    [(GPT2, "j_per_1000_tokens", 4 * (8 + 24) / 2 / 1000), (RESNET, "j_per_image", 4)],
)
def test_what_is_trained_on_shares_the_energy_of_its_step(
    tmp_path: Path, model: str, metric: str, counted: float
) -> None:
    """From random weights too: it is what training begins with."""
    package = Package(tmp_path)
    step = TrainStep(batch_size=4, sequence_tokens=24, shortest_tokens=8)
    context, _ = doing(tmp_path, package.request, step)
    context = replace(context, runtime=trained(model), model=model)
    with Ticker(package.show, 0.001):
        reading = meter(tmp_path).read(context)
    assert reading.values[metric] == pytest.approx(reading.values["energy_j"] / counted)
    assert set(reading.values) == {"energy_j", "power_w", metric}


def test_without_a_counter_the_reasons_come_at_once(tmp_path: Path) -> None:
    context, request = doing(tmp_path, fail)
    reading = EnergyMeter(rest_s=3600, root=tmp_path).read(context)
    assert set(reading.reasons) == set(EnergyMeter.metrics)
    assert "no RAPL package" in reading.reasons["energy_j"]
    assert (reading.values, request.runs) == ({}, 0)


@pytest.mark.slow
def test_a_counter_that_vanishes_in_mid_run_is_a_reason_and_no_guess(tmp_path: Path) -> None:
    package = Package(tmp_path)
    shown = Ticker(package.show, 0.001)
    context, request = doing(tmp_path, package.vanish)
    with pytest.raises(OSError), shown:  # noqa: PT011 the made-up kernel finds no folder to write to
        reading = meter(tmp_path).read(context)
    assert "cannot be read" in reading.reasons["energy_j"]
    assert (reading.values, request.runs) == ({}, 1)
    assert tickers() == 0


@pytest.mark.slow
def test_a_request_that_breaks_down_leaves_no_thread_behind(tmp_path: Path) -> None:
    package = Package(tmp_path)
    context, _ = doing(tmp_path, fail)
    with Ticker(package.show, 0.001):
        with pytest.raises(ZeroDivisionError):
            meter(tmp_path).read(context)
        assert tickers() == 1, "the made-up package's own"


def test_random_weights_have_no_energy(tmp_path: Path) -> None:
    reading = EnergyMeter().read(generating(tmp_path))
    assert "are random" in reading.reasons["energy_j"]
    assert set(reading.reasons) == set(EnergyMeter.metrics)


@pytest.mark.slow
def test_a_gpu_s_energy_is_counted(library: Path) -> None:
    reading = ask(library, "energy")
    assert reading["values"]["energy_j"] == pytest.approx(REQUEST_J, rel=0.05)
    assert reading["values"]["j_per_token"] == pytest.approx(reading["values"]["energy_j"] / 10)
    facts = reading["facts"]["energy"]
    assert (facts["source"], facts["resolution_j"]) == ("NVML total energy counter", 1e-3)
    assert facts["idle_w"] == pytest.approx(10, rel=0.05)
    assert "not the host" in facts["scope"]


@pytest.mark.slow
def test_where_a_gpu_has_no_counter_its_power_is_integrated(library: Path) -> None:
    """300 W above idle as long as requests run, however long each of them takes."""
    reading = ask(library, "energy", "no_counter")
    facts = reading["facts"]["energy"]
    assert (facts["source"], facts["resolution_j"]) == ("NVML power, integrated", None)
    above_j = reading["values"]["energy_j"] * facts["requests"]
    assert above_j == pytest.approx(300 * facts["window_s"], rel=0.1)
    assert facts["looks"] >= 10 * facts["window_s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "reason"),
    cases(
        [
            ("refuses", "does not let this user read its energy counter"),
            ("lost", "The GPU is lost"),
            ("falls", "fell from"),
            ("jumps", "jumped from"),
            ("still", "did not change"),
            ("not_loaded", "driver is not loaded"),
        ]
    ),
)
def test_a_gpu_s_counter_that_fails_is_a_reason_and_no_guess(library: Path, mode: str, reason: str) -> None:
    """Lost, falling and jumping come after two dozen looks: within the window of requests."""
    reading = ask(library, "energy", mode, after=24)
    assert reading["values"] == {}
    assert set(reading["reasons"]) == set(EnergyMeter.metrics)
    assert reason in reading["reasons"]["energy_j"]
    assert reading["threads"] == ["MainThread"]
    assert (reading["runs"] > 0) == (mode in ("lost", "falls", "jumps"))


@pytest.mark.slow
def test_utilization_is_the_mean_while_requests_run(library: Path) -> None:
    """At rest the made-up GPU says 0, and 80% while something burns: nothing of the time before is counted."""
    reading = ask(library, "gpu_utilization")
    assert reading["values"] == {"gpu_utilization": pytest.approx(0.8)}
    facts = reading["facts"]["recorded"]["gpu_utilization"]
    assert facts["samples"] >= 2
    assert facts["requests"] >= 1
    assert reading["threads"] == ["MainThread"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "reason"), [("refuses", "does not let this user read its utilization"), ("lost", "is lost")]
)
def test_a_gpu_that_does_not_tell_is_a_reason(library: Path, mode: str, reason: str) -> None:
    reading = ask(library, "gpu_utilization", mode, after=3)
    assert reading["values"] == {}
    assert reason in reading["reasons"]["gpu_utilization"]
    assert (reading["runs"] == 0) == (mode == "refuses"), "what is refused is known before a request is run"


def test_a_job_on_a_cpu_has_none_and_runs_nothing(tmp_path: Path) -> None:
    context, request = doing(tmp_path, fail)
    reading = GpuUtilizationMeter().read(context)
    assert "runs on a CPU" in reading.reasons["gpu_utilization"]
    assert request.runs == 0


CPU = "sys__devices__system__cpu__cpu{}__{}"


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
