"""Energy from a CPU's counters as the kernel shows them, and from a GPU's through the real NVML bindings."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from optigpu.hardware.sensors import Ticker
from optigpu.meters.energy import EnergyMeter
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.train_step import TrainStep
from tests.drivers.nvml import ask, build
from tests.drivers.questions import REQUEST_J
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

    def cool_request(self) -> None:
        """What kept the machine busy while it was to be at rest has ended."""
        time.sleep(0.02)
        self.watts = IDLE_W / 2

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
def test_a_workload_without_tokens_has_no_joules_per_token(tmp_path: Path) -> None:
    package = Package(tmp_path)
    context, _ = doing(tmp_path, package.request)
    with Ticker(package.show, 0.001):
        reading = meter(tmp_path).read(context)
    assert set(reading.values) == {"energy_j", "power_w"}
    assert reading.reasons == {
        "j_per_token": "matmul generates no tokens",
        "j_per_image": "matmul classifies no images",
        "j_per_1000_tokens": "matmul learns no tokens",
    }


@pytest.mark.slow
def test_images_share_the_energy_of_their_request(tmp_path: Path) -> None:
    package = Package(tmp_path)
    context, _ = doing(tmp_path, package.request, Classify(batch_size=4))
    with Ticker(package.show, 0.001):
        reading = meter(tmp_path).read(context)
    assert reading.values["j_per_image"] == pytest.approx(reading.values["energy_j"] / 4)
    assert set(reading.reasons) == {"j_per_token", "j_per_1000_tokens"}


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


@pytest.mark.slow
def test_a_sweep_s_batch_shares_the_energy_of_its_request(tmp_path: Path) -> None:
    package = Package(tmp_path)
    (workload,) = BatchSweep(batch_sizes=(3,), new_tokens=2).expand()
    context, _ = doing(tmp_path, package.request, workload)
    with Ticker(package.show, 0.001):
        reading = meter(tmp_path).read(context)
    assert reading.values["j_per_token"] == pytest.approx(reading.values["energy_j"] / 6)


@pytest.mark.slow
def test_a_request_that_draws_no_more_than_idle_has_no_energy(tmp_path: Path) -> None:
    package = Package(tmp_path)
    context, _ = doing(tmp_path, package.cool_request)
    with Ticker(package.show, 0.001):
        reading = meter(tmp_path).read(context)
    assert set(reading.values) == {"power_w"}
    assert "no more than the idle device" in reading.reasons["energy_j"]


def test_without_a_counter_the_reasons_come_at_once(tmp_path: Path) -> None:
    context, request = doing(tmp_path, fail)
    reading = EnergyMeter(rest_s=3600, root=tmp_path).read(context)
    assert set(reading.reasons) == set(EnergyMeter.metrics)
    assert "no RAPL package" in reading.reasons["energy_j"]
    assert (reading.values, request.runs) == ({}, 0)


def test_a_counter_that_vanishes_in_mid_run_is_a_reason_and_no_guess(tmp_path: Path) -> None:
    package = Package(tmp_path)
    shown = Ticker(package.show, 0.001)
    context, request = doing(tmp_path, package.vanish)
    with pytest.raises(OSError), shown:  # noqa: PT011 the made-up kernel finds no folder to write to
        reading = meter(tmp_path).read(context)
    assert "cannot be read" in reading.reasons["energy_j"]
    assert (reading.values, request.runs) == ({}, 1)
    assert tickers() == 0


def test_a_counter_that_stands_still_is_a_reason(tmp_path: Path) -> None:
    package = Package(tmp_path)
    package.show()
    context, _ = doing(tmp_path, package.request)
    assert "did not change" in meter(tmp_path).read(context).reasons["energy_j"]


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


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("refuses", "does not let this user read its energy counter"),
        ("lost", "The GPU is lost"),
        ("falls", "fell from"),
        ("jumps", "jumped from"),
        ("still", "did not change"),
        ("not_loaded", "driver is not loaded"),
    ],
)
def test_a_gpu_s_counter_that_fails_is_a_reason_and_no_guess(library: Path, mode: str, reason: str) -> None:
    """Lost, falling and jumping come after two dozen looks: within the window of requests."""
    reading = ask(library, "energy", mode, after=24)
    assert reading["values"] == {}
    assert set(reading["reasons"]) == set(EnergyMeter.metrics)
    assert reason in reading["reasons"]["energy_j"]
    assert reading["threads"] == ["MainThread"]
    assert (reading["runs"] > 0) == (mode in ("lost", "falls", "jumps"))
