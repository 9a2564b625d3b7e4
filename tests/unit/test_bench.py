"""The jobs of `optigpu bench`, and the line that sums them up."""

from typing import Any

import pytest

from optigpu.documents.result import Attribution, AttributionRow, Gain, Verdict
from optigpu.hardware import probe
from optigpu.job.bench import bench_specs
from optigpu.job.plan import variants_of
from optigpu.report.bench import bench_line
from optigpu.vocabulary import BenchMode, DeviceKind, Precision, Role, SpecError, VariantStatus
from tests.unit.made_results import metric, result

GPT2 = "preset:gpt2"


def labels(mode: BenchMode, precision: Precision) -> list[str]:
    *_, decoding = bench_specs(probe(), DeviceKind.CPU, mode, precision, GPT2)
    return [variant.label for variant in variants_of(decoding)]


def test_a_quick_bench_decodes_with_the_baseline_and_our_decoder() -> None:
    assert labels(BenchMode.QUICK, Precision.INT4) == ["baseline", "native_decode"]
    assert labels(BenchMode.QUICK, Precision.FP32) == ["baseline"]


@pytest.mark.parametrize(
    ("precision", "weights"), [(Precision.BF16, "bf16"), (Precision.INT8, "w8"), (Precision.INT4, "w4")]
)
def test_our_decoder_has_the_precision_that_was_asked_for(precision: Precision, weights: str) -> None:
    *_, decoding = bench_specs(probe(), DeviceKind.CPU, BenchMode.QUICK, precision, GPT2)
    (technique,) = decoding.beside[-1].stack
    assert technique.model_dump()["weights"] == weights
    assert technique.model_dump()["calibration"] == "none"


@pytest.mark.parametrize("device", list(DeviceKind))
@pytest.mark.parametrize("mode", list(BenchMode))
def test_every_mode_has_products_attention_and_decoding(device: DeviceKind, mode: BenchMode) -> None:
    specs = bench_specs(probe(), device, mode, Precision.INT8, GPT2)
    assert [spec.workload.kind for spec in specs] == ["matmul", "attention", "generate"]
    assert all(spec.tags == ("bench", mode) and spec.device is device for spec in specs)


def test_a_model_that_does_not_decode_is_refused() -> None:
    with pytest.raises(SpecError, match="classifies images"):
        bench_specs(probe(), DeviceKind.CPU, BenchMode.QUICK, Precision.INT4, "preset:resnet-50")


def decoded(index: int, label: str, rate: float) -> dict[str, Any]:
    metrics = {"tokens_per_s": metric("tokens_per_s", rate, (rate * 0.9, rate * 1.1))}
    document: dict[str, Any] = result(index, Role.SINGLE, label, metrics, Verdict(valid=True)).model_dump(
        mode="json"
    )
    return document


def test_the_line_has_the_best_figure_with_its_gain_and_its_origin() -> None:
    rows = (
        AttributionRow(index=0, role=Role.BASELINE, label="baseline", status=VariantStatus.SUCCEEDED),
        AttributionRow(
            index=1,
            role=Role.SINGLE,
            label="native_decode",
            status=VariantStatus.SUCCEEDED,
            speedup=Gain(ratio=20.04, ci=(18.0, 22.0), compared_with=0),
        ),
    )
    results = [decoded(0, "baseline", 30.0), decoded(1, "native_decode", 601.0)]
    nothing = Attribution(metric="tflops", rows=())
    line = bench_line([(results, Attribution(metric="tokens_per_s", rows=rows, best=1)), ([], nothing)])
    assert "native_decode: 601 ±60 tokens/s, 20.0x the baseline. Measured " in line
    assert "Test CPU" in line
