"""The share of time in which the GPU worked, through the real NVML bindings."""

from pathlib import Path

import pytest

from optigpu.meters.gpu_utilization import GpuUtilizationMeter
from tests.drivers.nvml import ask, build
from tests.engine.meter_contexts import doing, fail


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.mark.slow
def test_utilization_is_the_mean_while_requests_run(library: Path) -> None:
    """At rest the made-up GPU says 0, and 80% while something burns: nothing of the time before is counted."""
    reading = ask(library, "gpu_utilization")
    assert reading["values"] == {"gpu_utilization": pytest.approx(0.8)}
    facts = reading["facts"]["recorded"]["gpu_utilization"]
    assert facts["samples"] >= 2
    assert facts["requests"] >= 1
    assert reading["threads"] == ["MainThread"]


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
