"""DeepLearningBenchmark times any module: what is counted and what is not, in forward passes and training steps."""

from typing import Any

import pytest
import torch
from torch import nn

from optigpu import BenchmarkResult, DeepLearningBenchmark
from optigpu.vocabulary import OptiGPUError, SpecError, UnsupportedError


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


def test_what_a_cpu_has_not_is_said_and_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    inference(DeepLearningBenchmark("cpu"), Counting()).print_summary()
    shown = capsys.readouterr().out
    assert "VRAM not measured" in shown
    assert "A CPU has no VRAM" in shown
    assert "Power:      not measured" in shown


class Two(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + 2 * b


@pytest.mark.parametrize(
    "inputs", [{"a": rows(), "b": rows()}, (rows(), rows())], ids=["by name", "by place"]
)
def test_inputs_may_be_several(inputs: Any) -> None:
    bench = DeepLearningBenchmark("cpu")
    result = bench.benchmark_inference("two", Two(), lambda: inputs, n_warmup=1, n_runs=5, show=False)
    assert len(result.latencies_s) == 5
    assert result.params_total == 0


def test_results_stand_beside_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    bench = DeepLearningBenchmark("cpu")
    with pytest.raises(SpecError, match="no results to compare; call benchmark_inference"):
        bench.compare_results()
    bench.benchmark_inference("small", nn.Linear(8, 8), rows, 1, 30)
    bench.benchmark_inference("large", nn.Linear(8, 4096), rows, 1, 30)
    bench.compare_results()
    table = capsys.readouterr().out
    assert "=== small ===" in table
    assert "small" in table.split("Inference")[1]
    assert "x [" in table.split("large")[-1]
    assert list(bench.to_frame()["name"]) == ["small", "large"]


def test_a_training_step_trains() -> None:
    model = Counting().eval()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    before = loss(model(rows()), labelled()[1]).item()
    bench = DeepLearningBenchmark("cpu")
    result = bench.benchmark_training_step("model", model, optimizer, loss, labelled, n_steps=12, show=False)
    assert len(result.latencies_s) == 12 - 5
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


def test_wrong_requests_are_one_sentence() -> None:
    bench, model = DeepLearningBenchmark("cpu"), Counting()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(SpecError, match="no device 'tpu'; the devices are cpu, cuda"):
        DeepLearningBenchmark("tpu")
    with pytest.raises(SpecError, match="N_steps must be more than the 5"):
        bench.benchmark_training_step("model", model, optimizer, nn.MSELoss(), labelled, n_steps=5)
    with pytest.raises(SpecError, match="two things, inputs and labels"):
        bench.benchmark_training_step("model", model, optimizer, nn.MSELoss(), rows, show=False)  # type: ignore[arg-type]
    with torch.no_grad():
        model.layer.bias.fill_(float("nan"))
    with pytest.raises(OptiGPUError, match="12 values that are NaN or infinite; check its weights"):
        inference(bench, model)


def test_a_gpu_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="finds no CUDA device"):
        inference(DeepLearningBenchmark(), Counting())


def test_the_framework_of_the_founding_document_runs_as_it_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = DeepLearningBenchmark(device="cuda" if torch.cuda.is_available() else "cpu")
    print("Benchmarking framework initialized")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    bench.benchmark_inference(name="FP32", model=model, input_fn=rows, n_warmup=10, n_runs=100, batch_size=1)
    bench.benchmark_training_step(
        name="FP32",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        loss_fn=nn.CrossEntropyLoss(),
        input_fn=labelled,
        n_steps=50,
    )
    bench.compare_results()
    shown = capsys.readouterr().out
    assert "=== FP32 ===" in shown
    assert "Training steps" in shown
