"""`benchmarks.vs_peers` with engines beside torch: the rows of a real job, and divergences on a trained model."""

from collections.abc import Iterator

import pytest

from benchmarks.engine_cases import ONNX_INT4, OPENVINO_INT4
from benchmarks.stacks import Q4_0, Case, details_of, spec_of
from benchmarks.vs_cases import FP32, OURS, uncalibrated
from benchmarks.vs_goals import counting
from benchmarks.vs_jobs import lines_of
from benchmarks.vs_quality import measured
from optigpu.measure import run
from tests.engine.brief_jobs import BRIEF
from tests.engine.converted_engines import own_cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.openvino,
    pytest.mark.onnxruntime,
    pytest.mark.usefixtures("own_lock"),
]
ENGINES = (ONNX_INT4, OPENVINO_INT4)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("engines"))


@pytest.mark.long
def test_one_job_gives_the_rows_of_decoding_and_of_prefill() -> None:
    stacks = (FP32, uncalibrated(OURS[0]), *ENGINES)
    decode, prefill = Case("tiny-llama-test", 16, 8), Case("tiny-llama-test", 16, 8, "prefill")
    measure = BRIEF["measure"] | {"meters": ["latency", "memory"]}
    report = run(spec_of(stacks, decode, measure, BRIEF["limits"]), lambda _: None)
    for case in (decode, prefill):
        reference, ours, onnx, openvino = lines_of(report, stacks, case, group=0)
        assert reference.ratio == pytest.approx(1.0)
        for line in (onnx, openvino):
            assert line.reason is None
            assert line.rates[0] > 0
            assert line.ours == ours.rates
        assert onnx.details["version"].startswith("onnxruntime ")
        assert openvino.details["tensor_types"]["i4"] > 0
    assert lines_of(report, stacks, decode, 0)[1].rates != lines_of(report, stacks, prefill, 0)[1].rates


@pytest.mark.long
def test_engines_predict_the_tokens_that_the_fp32_model_wrote() -> None:
    found = measured("bundled:tiny", [OURS[1], *ENGINES], Q4_0, sequences=1)
    ours, *others = found["lines"]
    for line in others:
        assert ours["kld_mean"] < line["kld_mean"] < 0.1, line
        assert details_of(line["details"])["flags"]
    assert counting(found["lines"]) == frozenset(), "their 4 bits diverge more than ours by more than a tenth"
