"""The runtime of workloads without a model: it makes their operators.

Square matrix products are torch's own; of layer norm and RMS norm there are torch's and optigpu's fused ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend

from optigpu.backends.operators import (
    AttentionPlace,
    AttentionRow,
    AttentionShape,
    KernelCall,
    MatmulBlock,
    NormRows,
    NormShape,
)
from optigpu.backends.runtime import MemoryPeaks
from optigpu.backends.torch.attention import attention_kernels, one_of_kernels
from optigpu.backends.torch.device import TorchDevice, calls_s, free_bytes, operator_peaks_of
from optigpu.backends.torch.kernels import TorchKernel
from optigpu.backends.torch.profile import TorchRuntime
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, norm_backend
from optigpu.vocabulary import DeviceKind, UnsupportedError

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


class TorchOperator(ABC):
    """One operator with its inputs, which are drawn on the device itself from its seed."""

    def __init__(self, place: TorchDevice) -> None:
        self.place = place
        self._source = torch.Generator(place.name).manual_seed(place.seed)

    @abstractmethod
    def call(self) -> object:
        """One call."""

    @abstractmethod
    def held(self) -> Sequence[torch.Tensor]:
        """The tensors that exist before and after a call."""

    @abstractmethod
    def drawn(self) -> Sequence[torch.Tensor]:
        """The tensors that each request draws anew."""

    def seconds(self, calls: int) -> float:
        return calls_s(self.call, calls, self.place.clock)

    def redraw(self, seed: int) -> None:
        """Fills the same storages with new numbers: further ones might not fit."""
        self._source.manual_seed(seed)
        for tensor in self.drawn():
            tensor.normal_(generator=self._source)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self._source, device=self.place.name, dtype=dtype)


def standard_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by its definition, [..., length, head_size] each; `hidden` marks the pairs that do not count."""
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), value)


class TorchAttention(TorchOperator):
    def __init__(self, place: TorchDevice, shape: AttentionShape) -> None:
        """Raises UnsupportedError where no fused kernel takes these shapes on this device."""
        super().__init__(place)
        self._shape = shape
        dtype = dtype_of(shape.dtype)
        self._query, self._key, self._value = (
            self.normal(shape.batch_size, heads, shape.length, shape.head_size, dtype=dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self._hidden = None
        if shape.causal and not shape.fused:
            full = torch.ones(shape.length, shape.length, dtype=torch.bool, device=place.name)
            self._hidden = full.triu(1)
        if (
            shape.fused
        ):  # torch falls back to its definition in silence, so it is asked once for a kernel alone
            refusal = (
                f"PyTorch has no fused attention kernel for {shape.dtype} with heads of {shape.head_size}"
                f"{' in groups' if shape.group > 1 else ''} on this {place.device}; ask for float16 or bfloat16, or "
                "for other heads."
            )
            with one_of_kernels(_FUSED, refusal):
                self._fused()

    def call(self) -> torch.Tensor:
        return self._fused() if self._shape.fused else self._standard()

    def held(self) -> Sequence[torch.Tensor]:
        return self.drawn() if self._hidden is None else (*self.drawn(), self._hidden)

    def drawn(self) -> Sequence[torch.Tensor]:
        return self._query, self._key, self._value

    def kernels(self) -> list[str]:
        return attention_kernels(self.call, self.place.device)

    def rows(self, places: Sequence[AttentionPlace]) -> Iterator[AttentionRow]:
        """Results of one call, with the queries, keys and values that they are of."""
        result = self.call()
        for batch, head, index in places:
            seen = index + 1 if self._shape.causal else self._shape.length
            shared = head // self._shape.group
            yield AttentionRow(
                query=wide(self._query[batch, head, index]),
                keys=wide(self._key[batch, shared, :seen]),
                values=wide(self._value[batch, shared, :seen]),
                result=wide(result[batch, head, index]),
            )

    def _standard(self) -> torch.Tensor:
        key, value = self._key, self._value
        if self._shape.group > 1:
            key, value = (tensor.repeat_interleave(self._shape.group, dim=1) for tensor in (key, value))
        return standard_attention(self._query, key, value, self._shape.scale, self._hidden)

    def _fused(self) -> torch.Tensor:
        shape, given = self._shape, (self._query, self._key, self._value)
        return torch.nn.functional.scaled_dot_product_attention(
            *given, is_causal=shape.causal, enable_gqa=shape.group > 1
        )


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def wide(tensor: torch.Tensor) -> NDArray[np.float64]:
    """The same numbers as float64, to be checked."""
    found: NDArray[np.float64] = tensor.cpu().double().numpy()  # an Apple GPU has no float64
    return found


Applied = tuple[torch.Tensor, torch.Tensor]
"""The norm, and the sum that it is of, both [rows, width]."""


class TorchNorm(TorchOperator):
    """The norm of random rows, of the sum with a residual where there is one."""

    def __init__(self, place: TorchDevice, shape: NormShape) -> None:
        super().__init__(place)
        self._shape = shape
        dtype = dtype_of(shape.dtype)
        self._rows = self.normal(shape.rows, shape.width, dtype=dtype)
        self._residual = self.normal(shape.rows, shape.width, dtype=dtype) if shape.residual else None
        self._weight = self.normal(shape.width, dtype=dtype)
        self._bias = self.normal(shape.width, dtype=dtype) if shape.norm == "layer_norm" else None
        self._apply = self._fused() if shape.fused else self._standard()

    def call(self) -> Applied:
        return self._apply()

    def held(self) -> Sequence[torch.Tensor]:
        tensors = (self._rows, self._residual, self._weight, self._bias)
        return [tensor for tensor in tensors if tensor is not None]

    def drawn(self) -> Sequence[torch.Tensor]:
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
        torch.mm(self._a, self._b, out=self._c)

    def held(self) -> Sequence[torch.Tensor]:
        return self._a, self._b, self._c

    def drawn(self) -> Sequence[torch.Tensor]:
        return self._a, self._b

    def block(self, places: Sequence[int]) -> MatmulBlock:
        """These rows and columns of the last product, and what they are the product of."""
        at = torch.tensor(places, device=self._a.device)
        return MatmulBlock(wide(self._a[at]), wide(self._b[:, at]), wide(self._c[at][:, at]))


class TorchOperatorRuntime(TorchRuntime):
    def __init__(self, device: DeviceKind, seed: int) -> None:
        super().__init__(TorchDevice(device, seed))
        self._made: TorchOperator | TorchKernel | None = None

    def free_bytes(self) -> int:
        return free_bytes(self.device)

    def matmul(self, size: int, dtype: str) -> TorchMatmul:
        self._made = made = TorchMatmul(self._place, size, dtype)
        return made

    def attention(self, shape: AttentionShape) -> TorchAttention:
        self._made = made = TorchAttention(self._place, shape)
        return made

    def norm(self, shape: NormShape) -> TorchNorm:
        self._made = made = TorchNorm(self._place, shape)
        return made

    def kernel(self, call: KernelCall) -> TorchKernel:
        self._made = made = TorchKernel(self._place, call)
        return made

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """On a CPU, the profiler's peak during one call of the operator that was made last."""
        if self.device is not DeviceKind.CPU or self._made is None:
            return super().peak_memory(run)
        run()
        return operator_peaks_of(self._made.call, self._made.held())
