"""The runtime of workloads without a model: it makes their operators.

Square matrix products are torch's own; of layer norm and RMS norm there are torch's and optigpu's fused ones.
"""

from collections.abc import Callable, Sequence

import torch

from optigpu.backends.operators import AttentionShape, MatmulBlock, NormRows, NormShape
from optigpu.backends.runtime import MemoryPeaks
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.device_runtime import TorchRuntime
from optigpu.backends.torch.memory import free_bytes, operator_peaks_of
from optigpu.backends.torch.operators.attention import TorchAttention
from optigpu.backends.torch.operators.base import TorchOperator, dtype_of, wide
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, norm_backend
from optigpu.vocabulary import DeviceKind, UnsupportedError

Applied = tuple[torch.Tensor, torch.Tensor]
"""The norm, and the sum that it is of, both [rows, width]."""


class TorchNorm(TorchOperator):
    """The norm of random rows, of the sum with a residual where there is one."""

    def __init__(self, place: TorchDevice, shape: NormShape) -> None:
        """Raises UnsupportedError where there is no fused kernel."""
        super().__init__(place)
        self._shape = shape
        dtype = dtype_of(shape.dtype)
        self._rows = self.normal(shape.rows, shape.width, dtype=dtype)
        self._residual = self.normal(shape.rows, shape.width, dtype=dtype) if shape.residual else None
        self._weight = self.normal(shape.width, dtype=dtype)
        self._bias = self.normal(shape.width, dtype=dtype) if shape.norm == "layer_norm" else None
        self._apply = self._fused() if shape.fused else self._standard()

    def call(self) -> Applied:
        """The norm and the sum."""
        return self._apply()

    def held(self) -> Sequence[torch.Tensor]:
        """The inputs."""
        tensors = (self._rows, self._residual, self._weight, self._bias)
        return [tensor for tensor in tensors if tensor is not None]

    def drawn(self) -> Sequence[torch.Tensor]:
        """The rows and the residual."""
        return [tensor for tensor in (self._rows, self._residual) if tensor is not None]

    def rows(self, places: Sequence[int]) -> NormRows:
        """These rows of one call, and what they are made of."""
        normed, summed = self.call()
        at = torch.tensor(places, device=normed.device)
        return NormRows(
            rows=wide(self._rows[at]),
            residual=None if self._residual is None else wide(self._residual[at]),
            weight=wide(self._weight),
            bias=None if self._bias is None else wide(self._bias),
            summed=wide(summed[at]),
            normed=wide(normed[at]),
        )

    def _standard(self) -> Callable[[], Applied]:
        shape = self._shape
        kind: type[torch.nn.LayerNorm | torch.nn.RMSNorm]
        kind = torch.nn.RMSNorm if self._bias is None else torch.nn.LayerNorm
        module = kind(shape.width, eps=shape.epsilon, device=self._rows.device, dtype=self._rows.dtype)
        values = {"weight": self._weight} | ({} if self._bias is None else {"bias": self._bias})
        module.requires_grad_(False).load_state_dict(values)

        def apply() -> Applied:
            summed = self._rows if self._residual is None else self._rows + self._residual
            return module(summed), summed

        return apply

    def _fused(self) -> Callable[[], Applied]:
        epsilon, bias = self._shape.epsilon, self._bias
        backend = norm_backend(self._rows.device)
        if backend == "torch":
            raise UnsupportedError(
                f"There is no fused norm on this {self.place.device}: it needs a C++ compiler on a CPU and Triton on "
                "CUDA; ask for the standard implementation."
            )
        self.place.notes.record(norm_backend=backend)
        if bias is None:
            return lambda: add_rms_norm(self._rows, self._residual, self._weight, epsilon)
        return lambda: add_layer_norm(self._rows, self._residual, self._weight, bias, epsilon)


class TorchMatmul(TorchOperator):
    """C = A B, each product written over the last."""

    def __init__(self, place: TorchDevice, size: int, dtype: str) -> None:
        """`dtype` tf32 is float32 that NVIDIA's tensor cores round."""
        super().__init__(place)
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        storage = torch.float32 if dtype == "tf32" else dtype_of(dtype)
        self._a, self._b = (self.normal(size, size, dtype=storage) for _ in range(2))
        self._c = torch.empty_like(self._a)

    def call(self) -> None:
        """One product."""
        torch.mm(self._a, self._b, out=self._c)

    def held(self) -> Sequence[torch.Tensor]:
        """Both operands and the product."""
        return self._a, self._b, self._c

    def drawn(self) -> Sequence[torch.Tensor]:
        """Both operands."""
        return self._a, self._b

    def block(self, places: Sequence[int]) -> MatmulBlock:
        """These rows and columns of the last product, and what they are the product of."""
        at = torch.tensor(places, device=self._a.device)
        return MatmulBlock(wide(self._a[at]), wide(self._b[:, at]), wide(self._c[at][:, at]))


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
