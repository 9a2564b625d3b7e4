"""matmul: its arithmetic, its check, and what it refuses."""

import pytest

from optigpu.backends.torch import memory
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.matmul import Dtype, Matmul


@pytest.fixture
def runtime() -> TorchOperatorRuntime:
    return TorchOperatorRuntime(DeviceKind.CPU, seed=0)


def one(size: int, dtype: Dtype = "float32") -> Matmul:
    return Matmul(sizes=(size,), dtypes=(dtype,))


def test_a_list_of_shapes_stands_for_one_workload_each() -> None:
    expanded = Matmul(sizes=(8, 16), dtypes=("float32", "bfloat16")).expand()
    assert [workload.label for workload in expanded] == [
        "float32 8",
        "float32 16",
        "bfloat16 8",
        "bfloat16 16",
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 3, 200])
def test_a_product_is_right_in_every_dtype_of_a_cpu(
    runtime: TorchOperatorRuntime, size: int, dtype: Dtype
) -> None:
    assert one(size, dtype).prepare(runtime).check().problem is None


def test_a_wrong_product_is_found(runtime: TorchOperatorRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product in bfloat16 is not right as one in float32."""
    import torch

    exact = torch.mm

    def rounded(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(exact(a.bfloat16(), b.bfloat16()))

    monkeypatch.setattr(torch, "mm", rounded)
    problem = one(200).prepare(runtime).check().problem
    assert problem is not None
    assert problem.startswith("The product is wrong")


def test_a_sample_is_long_enough_for_the_clock(runtime: TorchOperatorRuntime) -> None:
    sample = one(16).prepare(runtime).run()
    assert runtime.notes.facts["calls_per_sample"] > 100
    assert sample["tflops"] == pytest.approx(2 * 16**3 / sample["latency_s"] / 1e12)
    assert tuple(sample) == Matmul.metrics


def test_tf32_is_refused_without_cuda(runtime: TorchOperatorRuntime) -> None:
    with pytest.raises(UnsupportedError, match="tf32"):
        one(16, "tf32").prepare(runtime)


def test_matrices_that_do_not_fit_are_refused_before_they_are_made(
    runtime: TorchOperatorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 2_000_000)
    one(400).prepare(runtime)
    with pytest.raises(UnsupportedError, match="three 500 x 500 float32 matrices need"):
        one(500).prepare(runtime)
