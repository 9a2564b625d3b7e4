"""Layer norm and RMS norm: torch's own, and optigpu's fused ones."""

from collections.abc import Callable, Sequence

import torch

from optigpu.backends.operators import NormRows, NormShape
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.operators.base import TorchOperator, dtype_of, wide
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, norm_backend
from optigpu.vocabulary import UnsupportedError

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
