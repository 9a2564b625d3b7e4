"""Each engine's own tool times the model that the engine's backend has converted."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.own_tools import (
    llama_bench,
    llama_counters,
    onnxruntime_loop,
    openvino_loop,
    torch_timer,
)
from benchmarks.own_tools.asked import Rate, prompt_of
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.engine.converted_engines import TINY, own_cache, prepared

pytestmark = pytest.mark.slow
PROMPT, NEW = 8, 12
LOADS: tuple[tuple[str, str, Callable[[Order], Rate]], ...] = (
    ("llama_cpp", "gguf", lambda order: llama_counters.counted(order, PROMPT + NEW)),
    ("onnxruntime", "onnx_int8", onnxruntime_loop.looped),
    ("openvino", "openvino_int8", openvino_loop.looped),
)
MARKS = {"llama_cpp": "llama"}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("tools"))


def order(folder: Path, *names: str) -> Order:
    stack = resolve((TECHNIQUES[name](name=name) for name in names), "generate")
    workload = Generate(prompt_tokens=PROMPT, new_tokens=NEW)
    return Order(TINY, stack, workload, DeviceKind.CPU, 0, 1, folder, probe())


@pytest.mark.parametrize(
    ("backend", "technique", "load"),
    [
        pytest.param(*each, marks=getattr(pytest.mark, MARKS.get(each[0], each[0])), id=each[0])
        for each in LOADS
    ],
)
def test_a_tool_times_what_was_converted(
    tmp_path: Path, backend: str, technique: str, load: Callable[[Order], Rate]
) -> None:
    asked = order(tmp_path, technique)
    prepared(backend, tmp_path, *asked.stack)
    rate = load(asked)
    assert rate(prompt_of(asked, PROMPT), NEW) > 0
    assert rate(prompt_of(asked, PROMPT), NEW) > 0


def test_torch_s_timer_times_the_plain_model_alone(tmp_path: Path) -> None:
    plain = order(tmp_path)
    assert torch_timer.timed(plain)(prompt_of(plain, PROMPT), NEW) > 0
    with pytest.raises(UnsupportedError, match="OptiGPU's own"):
        torch_timer.timed(order(tmp_path, "bf16"))


def test_a_program_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no-such-bench is not there; build llama-bench"):
        llama_bench.benched(order(tmp_path, "gguf"), "no-such-bench")


@pytest.mark.onnxruntime
def test_what_was_not_converted_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"benchmarks\.engines --convert"):
        onnxruntime_loop.looped(order(tmp_path, "onnx_int4"))
