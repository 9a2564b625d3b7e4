"""GPUProfiler: kernels with their bandwidth, under roofs that are measured here and published for the card."""

from typing import Any

import pytest
import torch

from optigpu import GPUProfiler
from optigpu.documents.peaks import Bound, Peaks, ReadRate
from optigpu.facade.gpu_profiler import kernel_figures, published_roofs
from optigpu.hardware.catalog import gpu_of
from optigpu.hardware.intensity import Kernel
from optigpu.vocabulary import DeviceKind, SpecError, utc_now

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


def test_half_precision_runs_under_autocast_and_leaves_the_model(
    profiler: GPUProfiler, module: torch.nn.Module
) -> None:
    found = profiler.profile_model_forward(module, torch.ones(ROWS, WIDTH), "BF16")
    (product,) = [kernel for kernel in found.kernels if kernel.name == "aten::addmm"]
    assert product.read_bytes == 2 * (ROWS * WIDTH + WIDTH * OUT + OUT)
    assert next(module.parameters()).dtype is torch.float32
    assert found.precision == "BF16"


def test_a_summary_names_both_roofs_and_says_what_is_predicted(
    profiler: GPUProfiler, module: torch.nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler.profile_model_forward(module, torch.ones(ROWS, WIDTH), "FP32")
    profiler.print_summary()
    said = " ".join(capsys.readouterr().out.split())
    for words in ("aten::addmm", "measured: 10.0 GB/s", "published: 2,039 GB/s", "Prediction: NVIDIA A100"):
        assert words in said


def test_a_model_is_called_as_a_tokenizer_fills_it_and_lookups_have_no_bandwidth(
    profiler: GPUProfiler,
) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(50, 8)

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.table(input_ids)

    found = profiler.profile_model_forward(Table(), {"input_ids": torch.ones(2, 3, dtype=torch.long)})
    assert found.kernels
    assert all(kernel.read_bytes is None for kernel in found.kernels if "index" in kernel.name)


def test_one_of_several_kernels_of_an_operator_has_no_bandwidth() -> None:
    kernels = [Kernel("k", 1.0, None, 1.0, False, 8, None), Kernel("k", 1.0, None, 1.0, False)]
    (figure,) = kernel_figures(kernels, 1)
    assert (figure.read_bytes, figure.flop_per_byte, figure.read_bytes_per_s) == (None, None, None)


def test_a_precision_that_a_card_lacks_has_no_roofs() -> None:
    assert published_roofs(gpu_of("RTX 5090"), "INT4") is None
    assert published_roofs(gpu_of("T4"), "INT4") is not None


def test_unknown_names_list_the_known(profiler: GPUProfiler, module: torch.nn.Module) -> None:
    with pytest.raises(SpecError, match=r"'A1000' is not in the catalog.* Its GPUs are .*A100"):
        GPUProfiler("A1000")
    with pytest.raises(
        SpecError, match=r"'FP17' is unknown.* The precisions are FP32, FP16, BF16, INT8, INT4"
    ):
        profiler.profile_model_forward(module, torch.ones(ROWS, WIDTH), "FP17")
    with pytest.raises(SpecError, match="call profile_model_forward first"):
        profiler.roofline_analysis()
