"""CUDAKernelOptimizer measures with the repository's own operators where it can; here that is the CPU."""

from optigpu import CUDAKernelOptimizer
from optigpu.vocabulary import DeviceKind


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
