"""What torch's profiler says of one request, and that it is gone afterwards."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch.device_runtime import nvtx_range
from optigpu.backends.torch.profile import Recording
from optigpu.documents.peaks import Bound
from optigpu.meters.base import MeterContext
from optigpu.meters.profile import ProfileMeter
from optigpu.vocabulary import DeviceKind
from tests.engine.meter_contexts import doing, fail, generating, multiplying


def attached(runtime: Any) -> list[str]:
    """What a pass could have left behind."""
    import torch

    left = ["profiler"] if torch._C._autograd._profiler_enabled() else []
    return left + (["clock"] if type(runtime._place.clock).__name__ != "CpuClock" else [])


def recorded(context: MeterContext, steps: int) -> Recording:
    """One request, of which so many decode steps are recorded."""
    runtime: Any = context.runtime
    recording = Recording(runtime._place.clock, DeviceKind.CPU, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime._place, "clock", recording)
        recording.start()
        context.request.run()
        recording.stop()
    return recording


@pytest.mark.slow
def test_the_table_names_the_operators_of_a_generation(tmp_path: Path) -> None:
    context = generating(tmp_path, new_tokens=6)
    reading = ProfileMeter().read(context)
    facts = reading.facts.model_dump()["recorded"]["profile"]
    rows = facts["table"]
    assert len(rows) <= 20
    assert [row["share"] for row in rows] == sorted((row["share"] for row in rows), reverse=True)
    assert sum(row["share"] for row in rows) <= 1 + 1e-9
    assert rows[0]["name"].startswith("aten::")
    assert not {"aten::view", "aten::linear", "aten::empty"} & {row["name"] for row in rows}
    assert (facts["steps"], facts["steps_recorded"]) == (5, 5)
    assert attached(context.runtime) == []


@pytest.mark.slow
def test_decoding_is_memory_bound_and_a_large_product_is_not(tmp_path: Path) -> None:
    decoding = ProfileMeter().read(generating(tmp_path)).values
    assert decoding["memory_bound_share"] > 0.9
    assert decoding["memory_bound_share"] + decoding["compute_bound_share"] == pytest.approx(1)
    product = ProfileMeter().read(multiplying(tmp_path, 512))
    assert product.values["compute_bound_share"] > 0.9
    assert product.facts.model_dump()["recorded"]["profile"]["table"][0]["bound"] == Bound.COMPUTE


@pytest.mark.slow
def test_launches_are_counted_for_each_step(tmp_path: Path) -> None:
    few, many = (ProfileMeter().read(generating(tmp_path, new_tokens=n)) for n in (4, 8))
    assert few.values["launches_per_step"] == pytest.approx(many.values["launches_per_step"], rel=0.1)
    assert few.values["launches_per_step"] > 14, "the products alone"
    reasons = ProfileMeter().read(multiplying(tmp_path)).reasons
    assert reasons == {"launches_per_step": "this workload decodes no steps"}


@pytest.mark.slow
def test_every_operator_of_a_generation_is_recorded(tmp_path: Path) -> None:
    context = generating(tmp_path, new_tokens=6)
    kernels = recorded(context, steps=8).kernels()
    products = [kernel for kernel in kernels if kernel.name in ("aten::mm", "aten::bmm")]
    assert len(products) == 6 * (2 * 7 + 1), "two blocks of seven layers, and the head"
    assert {kernel.weight for kernel in kernels} == {1.0}


@pytest.mark.slow
def test_of_a_long_request_some_steps_stand_for_all(tmp_path: Path) -> None:
    context = generating(tmp_path, new_tokens=24)
    whole, part = recorded(context, steps=100), recorded(context, steps=4)
    assert (whole.steps, whole.recorded_steps, part.steps, part.recorded_steps) == (23, 23, 23, 4)
    in_steps = [[kernel for kernel in run.kernels() if kernel.in_steps] for run in (whole, part)]
    assert len(in_steps[1]) < len(in_steps[0]) / 4
    stood_for = [sum(kernel.weight for kernel in kernels) for kernels in in_steps]
    assert stood_for[1] == pytest.approx(stood_for[0], rel=0.05)


@pytest.mark.slow
def test_the_trace_is_chrome_s_and_kept_under_the_job_s_folder(tmp_path: Path) -> None:
    context = generating(tmp_path)
    readings = [ProfileMeter().read(context) for _ in range(2)]
    paths = [reading.artifacts["trace.json.gz"] for reading in readings]
    assert paths[0] != paths[1]
    assert all(path.is_relative_to(tmp_path / "artifacts") for path in paths)
    with gzip.open(paths[0]) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"aten::mm", "optigpu.first", "optigpu.steps"} <= names


def test_a_trace_that_is_too_large_is_not_kept_and_the_numbers_are(tmp_path: Path) -> None:
    reading = ProfileMeter(trace_limit_bytes=100).read(generating(tmp_path))
    assert reading.artifacts == {}
    assert "not kept" in reading.facts.model_dump()["recorded"]["profile"]["trace"]
    assert list((tmp_path / "artifacts").iterdir()) == []
    assert "memory_bound_share" in reading.values


def test_a_request_that_breaks_down_leaves_no_profiler_behind(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, fail)
    with pytest.raises(ZeroDivisionError):
        ProfileMeter().read(context)
    assert attached(context.runtime) == []
    assert ProfileMeter().read(multiplying(tmp_path)).values, "and the next one can be profiled"


def test_a_request_that_breaks_down_within_a_step_leaves_no_profiler_behind(tmp_path: Path) -> None:
    def mark_and_fail() -> None:
        for _ in range(3):
            runtime._place.clock.mark()
        fail()

    context, _ = doing(tmp_path, mark_and_fail)
    runtime: Any = context.runtime
    with pytest.raises(ZeroDivisionError):
        ProfileMeter().read(context)
    assert attached(context.runtime) == []


def test_a_request_without_kernels_is_a_reason(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, lambda: None)
    reading = ProfileMeter().read(context)
    assert set(reading.reasons) == set(ProfileMeter.metrics)
    assert "saw no kernel on the cpu" in reading.reasons["launches_per_step"]


def test_a_range_on_a_cpu_is_nothing_and_lets_errors_through() -> None:
    with nvtx_range("round", DeviceKind.CPU):
        pass
    with pytest.raises(ZeroDivisionError), nvtx_range("round", DeviceKind.CPU):
        fail()
