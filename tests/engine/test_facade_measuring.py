"""Any module of a caller timed and profiled; run, ladder and BenchmarkEngine: what they measure, show and save."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import optigpu
from optigpu import (
    BenchmarkEngine,
    BenchmarkResult,
    CUDAKernelOptimizer,
    DeepLearningBenchmark,
    GPUProfiler,
    QuantizationOptimizer,
    runs,
)
from optigpu.documents.peaks import Bound, Peaks, ReadRate
from optigpu.facade.measuring import JobReport, ladder_spec
from optigpu.hardware import probe
from optigpu.hardware.catalog import gpu_of
from optigpu.job.plan import default_stack, variants_of
from optigpu.models.reference import bundled_parameters
from optigpu.vocabulary import DeviceKind, OptiGPUError, SpecError, utc_now
from optigpu.workloads.matmul import Matmul
from tests.engine.sessions import BRIEF
from tests.engine.tiny_models import tiny_model

pytestmark = [pytest.mark.usefixtures("forked_children"), pytest.mark.slow]

FOUNDING = """
from optigpu import BenchmarkEngine, QuantizationOptimizer, MemoryOptimizer
# ── Benchmark matmul vs RTX 5090 ──────────────────────────────
engine = BenchmarkEngine()
engine.run_matmul_suite()
# ── Load GPT-2 in INT4 and benchmark inference ────────────────
model, tok = QuantizationOptimizer.load("gpt2", precision="int4")
engine.run_inference(
    model, tok,
    prompt="The future of AI is",
    label="INT4 Inference"
)
# ── Print rich summary table + save chart + JSON ─────────────
engine.report()
engine.save("results/")
inputs = tok("The future of AI is", return_tensors="pt").input_ids
MemoryOptimizer.print_stats("before")
with MemoryOptimizer.optimized_inference():
    output = model.generate(inputs, max_new_tokens=100)
"""
"""The founding document's code; only the prompt of the last call is ours, which the document leaves open."""


@pytest.fixture(scope="module")
def engine(own_lock: None) -> BenchmarkEngine:
    """With a small product, a trained model and a preset."""
    made = BenchmarkEngine(device="cpu")
    made.run_matmul_suite(sizes=[64], **BRIEF)
    model, tokenizer = QuantizationOptimizer.load("bundled:tiny", precision="int8", device="cpu")
    made.run_inference(model, tokenizer, prompt="Once upon a time", label="tiny", new_tokens=8, seconds=0.1)
    model, _ = QuantizationOptimizer.load("preset:tiny-gpt2-test", precision="fp32", device="cpu")
    made.run_inference(model, None, new_tokens=4, seconds=0.1)
    return made


def test_inference_is_decoded_timed_and_weighed(engine: BenchmarkEngine) -> None:
    tiny, preset = engine.inference
    assert (tiny.name, tiny.throughput_of) == ("tiny", "tokens")
    assert (tiny.throughput_per_sec or 0) > 0
    assert (tiny.first_token_ms or 0) < (tiny.latency_ms_mean or 0)
    assert tiny.params_total == bundled_parameters("tiny")
    assert (tiny.model_size_mb or 0) * 2**20 < 4 * (tiny.params_total or 0)
    assert preset.name == "inference 2"
    assert preset.params_total == 527_872
    assert "The prompt was random: the model came without a tokenizer." in preset.notes


def test_the_report_has_products_inference_and_claims(
    engine: BenchmarkEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.report()
    shown = capsys.readouterr().out
    for expected in (
        "matmul 64 float32",
        "tiny",
        "RTX 5090",
        "40 TFLOPS",
        "not measured",
        "published figures",
    ):
        assert expected in shown
    assert list(engine.to_frame()["name"]) == ["tiny", "inference 2"]


def test_it_saves_charts_with_their_data_tables_and_everything_as_json(
    engine: BenchmarkEngine, tmp_path: Path
) -> None:
    written = engine.save(tmp_path / "results")
    assert {path.name for path in written} >= {"results.json", "comparison.md", "matmul.png", "inference.svg"}
    assert all(path.stat().st_size for path in written)
    saved = json.loads((tmp_path / "results" / "results.json").read_text("utf-8"))
    assert len(saved["results"]) == 3
    assert [each["name"] for each in saved["inference"]] == ["tiny", "inference 2"]
    assert saved["baselines"][0]["claim"]["status"] == "claimed"
    assert engine.plot("ladder").svg.startswith("<svg")


def test_an_engine_without_results_says_what_to_call() -> None:
    empty = BenchmarkEngine(device="cpu")
    for call in (empty.report, empty.save):
        with pytest.raises(SpecError, match=r"Nothing has been measured; call run_matmul_suite\(\)"):
            call()
    with pytest.raises(SpecError, match="no device 'tpu'"):
        BenchmarkEngine(device="tpu")


def test_a_model_keeps_its_own_decoding_settings(engine: BenchmarkEngine) -> None:
    """An end token would end requests early; it is set aside for the time that it is measured."""
    model: Any = tiny_model("llama").train()
    settings = model.generation_config
    settings.eos_token_id = list(range(96))
    result = BenchmarkEngine(device="cpu").run_inference(model, None, new_tokens=6, seconds=0.05)
    assert (result.throughput_per_sec or 0) > 0
    assert model.generation_config is settings
    assert model.training


@pytest.mark.long
@pytest.mark.usefixtures("own_lock")
def test_the_founding_code_runs_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the bundled model in the place of the hub's, which needs a network, and measured more briefly."""
    monkeypatch.setattr("optigpu.facade.engine.brief", lambda _: BRIEF)
    monkeypatch.chdir(tmp_path)
    typed: dict[str, Any] = {}
    exec(FOUNDING.replace('"gpt2"', '"bundled:tiny"'), typed)
    assert typed["output"].shape[1] - typed["inputs"].shape[1] == 100
    assert "INT4 Inference" in capsys.readouterr().out
    assert (tmp_path / "results" / "results.json").is_file()
    assert (tmp_path / "results" / "inference.png").is_file()


@pytest.fixture(scope="module")
def report(own_lock: None) -> JobReport:
    return optigpu.run(Matmul(sizes=(32, 64)), device="cpu", **BRIEF)


def test_a_report_has_what_was_measured(report: JobReport) -> None:
    assert [result.variant.label for result in report.results] == ["float32 32", "float32 64"]
    assert all((result.metrics["tflops"].value or 0) > 0 for result in report.results)
    assert repr(report) == "JobReport(matmul: 2 variants, 2 results)"
    assert report.stopped is None


def test_its_table_is_shown_on_a_terminal_and_in_a_notebook(report: JobReport) -> None:
    console = Console(width=140, record=True, file=sys.stderr)
    console.print(report)
    for shown in (console.export_text(), str(report), report._repr_html_()):
        assert "float32 64" in shown
        assert "TFLOP/s" in shown


def test_its_charts_are_pictures_and_files(report: JobReport, tmp_path: Path) -> None:
    drawn = report.plot("ladder", tmp_path / "matmul.svg")
    assert drawn._repr_svg_() == drawn.svg
    assert (tmp_path / "matmul.svg").read_text() == f"{drawn.svg}\n"
    assert "<svg" in (tmp_path / "matmul.svg").read_text("utf-8")
    with pytest.raises(SpecError, match=r"no chart 'laddr'. Did you mean ladder or loads\? The charts are "):
        report.plot("laddr")
    with pytest.raises(SpecError, match="quality"):
        report.plot("quality")


def test_what_it_saves_can_be_shown_again(report: JobReport, tmp_path: Path) -> None:
    kept = runs.read(report.save(tmp_path / "run.json"))
    assert [result["id"] for result in kept.results] == [result.id for result in report.results]
    with pytest.raises(OptiGPUError, match="cannot be written"):
        report.save(tmp_path / "missing" / "run.json")


def test_a_ladder_climbs_the_stack_that_is_named_or_the_usual_one() -> None:
    named = ladder_spec("generate", "preset:tiny-llama-test", ["bf16", "fused_qkv"], {"device": "cpu"})
    usual = ladder_spec("generate", "preset:tiny-llama-test", None, {"device": "cpu"})
    assert [each.name for each in named.stack] == ["bf16", "fused_qkv"]
    assert [variant.label for variant in variants_of(named)] == [
        "baseline", "bf16", "fused_qkv", "bf16 + fused_qkv",
    ]  # fmt: skip
    assert usual.stack == default_stack(probe(), DeviceKind.CPU, usual.workload, "torch")


class Counting(nn.Module):
    """A layer that notes how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append((torch.is_grad_enabled(), self.training))
        made: torch.Tensor = self.layer(x)
        return made


def rows() -> torch.Tensor:
    return torch.ones(4, 8)


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    return rows(), torch.tensor([0, 1, 2, 0])


def inference(bench: DeepLearningBenchmark, model: nn.Module, **options: Any) -> BenchmarkResult:
    return bench.benchmark_inference(
        "model", model, rows, show=False, **{"n_warmup": 2, "n_runs": 30} | options
    )


def test_runs_are_counted_without_warm_up_gradients_and_dropout() -> None:
    model = Counting().train()
    result = inference(DeepLearningBenchmark("cpu"), model, batch_size=4)
    assert len(result.latencies_s) == 30
    assert set(model.modes) == {(False, False)}
    assert len(model.modes) > 30 + 2
    assert result.throughput_per_sec == pytest.approx(4e3 / (result.latency_ms_mean or 0))


def test_weights_operations_and_percentiles_are_known() -> None:
    result = inference(DeepLearningBenchmark("cpu"), Counting(), n_runs=130)
    assert (result.params_total, result.params_trainable) == (27, 27)
    assert result.model_size_mb == 27 * 4 / 2**20
    assert result.flops_total == 2 * 4 * 8 * 3
    assert result.latency_ms_p50 is not None
    assert result.latency_ms_p95 is not None
    assert result.latency_ms_p99 is None
    assert "p99 662" in result.reasons["latency_ms_p99"]
    assert (result.latency_ms_ci or (0, 0))[1] > 0


def test_a_training_step_trains() -> None:
    model = Counting().eval()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    before = loss(model(rows()), labelled()[1]).item()
    bench = DeepLearningBenchmark("cpu")
    result = bench.benchmark_training_step("model", model, optimizer, loss, labelled, n_steps=12, show=False)
    assert len(result.latencies_s) == 12 - 5
    assert list(bench.to_frame()["name"]) == ["model"]
    assert result.throughput_of == "steps"
    assert set(model.modes[1:]) == {(True, True)}
    assert loss(model(rows()), labelled()[1]).item() < before
    assert bench.results == []
    assert bench.training_results == [result]


def test_a_loss_that_is_nan_ends_the_benchmark_with_its_step() -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    with pytest.raises(
        OptiGPUError, match=r"The loss of step \d+ is NaN or infinite; lower the learning rate"
    ):
        DeepLearningBenchmark("cpu").benchmark_training_step(
            "model", model, optimizer, nn.MSELoss(), lambda: (rows(), torch.ones(4, 3)), show=False
        )


ROWS, WIDTH, OUT = 64, 128, 256


@pytest.fixture(scope="module")
def peaks() -> Peaks:
    """Round peaks: 10 GB/s and 100 GFLOP/s, so that the ridge is 10 FLOP/byte."""
    return Peaks(
        device=DeviceKind.CPU,
        threads=torch.get_num_threads(),
        measured_at=utc_now(),
        torch=torch.__version__,
        reads=(ReadRate(array_bytes=2**28, bytes_per_s=1e10),),
        copy_bytes_per_s=1e10,
        matmul_flops_per_s={"float32": 1e11, "bfloat16": 2e11},
    )


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, OUT), torch.nn.GELU())


@pytest.fixture
def profiler(peaks: Peaks) -> GPUProfiler:
    return GPUProfiler("A100", peaks=peaks)


def test_kernels_have_the_bytes_and_operations_of_a_pass(
    profiler: GPUProfiler, module: torch.nn.Module
) -> None:
    found = profiler.profile_model_forward(module.train(), torch.ones(ROWS, WIDTH), "FP32")
    (product,) = [kernel for kernel in found.kernels if kernel.name == "aten::addmm"]
    assert product.calls == 1
    assert product.flops == 2 * ROWS * WIDTH * OUT
    assert product.read_bytes == 4 * (ROWS * WIDTH + WIDTH * OUT + OUT)
    assert product.read_bytes_per_s == product.read_bytes / product.seconds
    (gelu,) = [kernel for kernel in found.kernels if kernel.name == "aten::gelu"]
    assert gelu.read_bytes == 4 * ROWS * OUT
    assert sum(kernel.share for kernel in found.kernels) == pytest.approx(1)
    assert (found.dtype, found.device, found.peak_bytes) == ("float32", DeviceKind.CPU, None)
    assert found.weight_bytes == 4 * (WIDTH * OUT + OUT)
    assert module.training


def test_roofs_are_measured_here_and_published_elsewhere(
    profiler: GPUProfiler, module: torch.nn.Module
) -> None:
    profiler.profile_model_forward(module, torch.ones(ROWS, WIDTH), "FP32")
    found = profiler.roofline_analysis()
    assert found.here is not None
    assert found.card is not None
    assert (found.here.basis, found.here.ridge) == ("measured", 10)
    assert (found.card.basis, found.card.device) == ("published", "NVIDIA A100 SXM 80GB")
    a100 = gpu_of("A100")
    assert a100.memory_bandwidth_bytes_per_s is not None
    assert found.card.ridge == a100.peak_flop_per_s["fp32"] / a100.memory_bandwidth_bytes_per_s
    assert found.predicted
    by_name = {kernel.figure.name: kernel for kernel in found.kernels}
    product, gelu = by_name["aten::addmm"], by_name["aten::gelu"]
    assert (product.bound, gelu.bound) == (Bound.COMPUTE, Bound.MEMORY)
    assert product.roof_share == pytest.approx(2 * ROWS * WIDTH * OUT / 1e11 / product.figure.seconds)
    assert gelu.card_least_s == 4 * ROWS * OUT / a100.memory_bandwidth_bytes_per_s
    assert found.card_least_s == pytest.approx(sum(each.card_least_s or 0 for each in found.kernels))
    assert found.memory_bound_share + found.compute_bound_share == pytest.approx(1)


def test_a_product_is_measured_on_a_device_of_this_machine() -> None:
    found = CUDAKernelOptimizer.measure(DeviceKind.CPU, rows=1, inputs=256, outputs=64)
    assert found.basis == "measured"
    assert found.operation == "fused_int4_gemm"
    assert found.speedup == found.replaced_seconds / found.seconds > 0
    assert "A100" not in found.card


def test_a_card_that_is_not_here_is_predicted() -> None:
    optimizer = CUDAKernelOptimizer("T4")
    assert not optimizer.is_here
    assert optimizer.estimate_kernel_speedup().basis == "predicted"
