"""The runtime of workloads without a model: it makes their operators."""

from collections.abc import Callable

from optigpu.backends.operators import AttentionShape, NormShape
from optigpu.backends.runtime import MemoryPeaks
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.device_runtime import TorchRuntime
from optigpu.backends.torch.memory import free_bytes, operator_peaks_of
from optigpu.backends.torch.operators.attention import TorchAttention
from optigpu.backends.torch.operators.base import TorchOperator
from optigpu.backends.torch.operators.matmul import TorchMatmul
from optigpu.backends.torch.operators.norm import TorchNorm
from optigpu.vocabulary import DeviceKind


class TorchOperatorRuntime(TorchRuntime):
    """An OperatorRuntime on the bare device."""

    def __init__(self, device: DeviceKind, seed: int) -> None:
        super().__init__(TorchDevice(device, seed))
        self._made: TorchOperator | None = None

    def free_bytes(self) -> int:
        """The GPU's, or the host's."""
        return free_bytes(self.device)

    def matmul(self, size: int, dtype: str) -> TorchMatmul:
        """C = A B by torch.mm."""
        self._made = made = TorchMatmul(self._place, size, dtype)
        return made

    def attention(self, shape: AttentionShape) -> TorchAttention:
        """scaled_dot_product_attention, or its definition in separate operators."""
        self._made = made = TorchAttention(self._place, shape)
        return made

    def norm(self, shape: NormShape) -> TorchNorm:
        """torch's own norm, or optigpu's fused one."""
        self._made = made = TorchNorm(self._place, shape)
        return made

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """On a CPU, the profiler's peak during one call of the operator that was made last."""
        if self.device is not DeviceKind.CPU or self._made is None:
            return super().peak_memory(run)
        run()
        return operator_peaks_of(self._made.call, self._made.held())
