"""attention: standard against fused attention over the length of the sequence, in time and in memory."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Check, Runtime, Workload
from optigpu.workloads.requests.operators import (
    CHECKED,
    ROUNDING,
    UNDERFLOW,
    WIDTHS,
    Calls,
    Dtype,
    require_memory,
)
from optigpu.workloads.requests.shapes import OperatorShape

Implementation = Literal["standard", "fused"]
Length = Annotated[int, Field(ge=1, le=131072)]


class Attention(Workload):
    """Scaled dot-product attention over random queries, keys and values, for each implementation and length.

    "standard" is two matrix products with a softmax between them, which keeps every score in memory: PyTorch's own
    definition of scaled_dot_product_attention. "fused" is that function where it runs as one kernel (Dao et al.,
    FlashAttention, 2022, arXiv:2205.14135). `kv_heads` below `heads` (null: as many) are shared by groups of queries.
    """

    summary: ClassVar[str] = "standard against fused attention over the sequence's length, in time and memory"
    primary: ClassVar[str] = "tflops"
    metrics: ClassVar[tuple[str, ...]] = ("latency_s", "tflops")
    needs_model: ClassVar[bool] = False

    kind: Literal["attention"] = "attention"
    lengths: tuple[Length, ...] = Field((512, 1024, 2048, 4096, 8192), min_length=1, max_length=16)
    implementations: tuple[Implementation, ...] = Field(("standard", "fused"), min_length=1, max_length=2)
    batch_size: int = Field(1, ge=1, le=1024)
    heads: int = Field(12, ge=1, le=1024)
    kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    head_size: int = Field(64, ge=8, le=256)
    causal: bool = True
    dtype: Dtype = "float32"

    @model_validator(mode="after")
    def _shared_evenly(self) -> Self:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError("heads must be a multiple of kv_heads, so that each of those serves as many")
        return self

    def expand(self) -> tuple[Workload, ...]:
        """One workload for each length and implementation."""
        return tuple(
            self.model_copy(update={"lengths": (length,), "implementations": (implementation,)})
            for length in self.lengths
            for implementation in self.implementations
        )

    @property
    def label(self) -> str:
        """For example "standard 512"; lists are joined while they are not expanded."""
        return f"{'/'.join(self.implementations)} {'/'.join(map(str, self.lengths))}"

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that count, of one head: where it is causal, a query sees none after it."""
        (length,) = self.lengths
        return length * (length + 1) / 2 if self.causal else float(length**2)

    @property
    def flops(self) -> float:
        """Operations of the two products for the pairs that count; a multiplication and an addition are two."""
        return 4 * self.batch_size * self.heads * self.head_size * self.pairs

    @property
    def work_shape(self) -> OperatorShape:
        """Queries, keys and values are read and the result is written once; scores need not be in memory at all."""
        (length,) = self.lengths
        heads = 2 * self.heads + 2 * (self.kv_heads or self.heads)
        moved = self.batch_size * heads * length * self.head_size * WIDTHS[self.dtype]
        return OperatorShape(
            "attention", self.dtype, moved, units=self.flops / 1e12, attention_flops=self.flops
        )

    def prepare(self, runtime: Runtime) -> "AttentionRequest":
        """Draws queries, keys and values from the runtime's seed and finds out how many calls make a sample.

        Raises UnsupportedError where they and the scores do not fit the free memory, and where no fused kernel takes
        these shapes on this device.
        """
        return AttentionRequest(runtime, self)


class AttentionRequest:
    """One batch of equal calls."""

    def __init__(self, runtime: Runtime, shapes: Attention) -> None:
        import torch

        (self._length,), (self._implementation,) = shapes.lengths, shapes.implementations
        self._shapes, self._runtime = shapes, runtime
        require_memory(
            runtime.device,
            self._needed(),
            f"the arrays of {self._implementation} attention over {self._length} tokens",
        )
        device = runtime.device.value
        self._source = torch.Generator(device).manual_seed(runtime.seed)
        self._query, self._key, self._value = (
            torch.randn(
                (shapes.batch_size, heads, self._length, shapes.head_size),
                generator=self._source, device=device, dtype=getattr(torch, shapes.dtype),
            )
            for heads in (shapes.heads, self._kv_heads, self._kv_heads)
        )  # fmt: skip
        self._hidden = None
        if shapes.causal and self._implementation == "standard":
            full = torch.ones(self._length, self._length, dtype=torch.bool, device=device)
            self._hidden = full.triu(1)
        self._require_kernel()
        self._calls = Calls(runtime, self.call)
        runtime.notes.record(calls_per_sample=self._calls.count)

    def run(self) -> Mapping[str, float]:
        """The mean over one batch of calls."""
        latency_s = self._calls.mean_s()
        return {"latency_s": latency_s, "tflops": self._shapes.flops / latency_s / 1e12}

    def call(self) -> Any:
        """One call: [batch, heads, length, head_size]."""
        return self._fused() if self._implementation == "fused" else self._standard()

    @property
    def held(self) -> Sequence[Any]:
        """Queries, keys, values, and the mask where there is one."""
        tensors = (self._query, self._key, self._value, self._hidden)
        return [tensor for tensor in tensors if tensor is not None]

    def check(self) -> Check:
        """Compares a few rows with a float64 reference, within the worst rounding that the dtype allows."""
        import torch

        request_s = self._calls.sample_s()
        result = self.call()
        places = torch.linspace(0, result[..., 0].numel() - 1, CHECKED).long().unique().tolist()
        heads, length = self._shapes.heads, self._length
        worst = max(
            self._error_over_bound(result, place // (heads * length), place // length % heads, place % length)
            for place in places
        )
        if not worst <= 1:
            problem = (
                f"The attention is wrong: an element is off by {worst:.3g} times the dtype's worst rounding."
            )
            return Check(request_s, problem)
        return Check(request_s, details={"error_over_bound": worst})

    def observe(self) -> None:
        """Records which attention kernels run."""
        self._runtime.notes.record(attention_kernels=self._runtime.attention_kernels(self.call))

    def described(self) -> Mapping[str, Sequence[float]]:
        """A call has no parts."""
        return {}

    def fresh(self) -> "AttentionRequest":
        """The same storages, filled anew: other ones might not fit."""
        for tensor in (self._query, self._key, self._value):
            tensor.normal_(generator=self._source)
        return self

    @property
    def _kv_heads(self) -> int:
        return self._shapes.kv_heads or self._shapes.heads

    @property
    def _group(self) -> int:
        """Heads that share one head of keys and values."""
        return self._shapes.heads // self._kv_heads

    def _standard(self) -> Any:
        import torch

        key, value = self._key, self._value
        if self._group > 1:
            key, value = (tensor.repeat_interleave(self._group, dim=1) for tensor in (key, value))
        scores = torch.matmul(self._query, key.transpose(-2, -1)) * self._scale
        if self._hidden is not None:
            scores.masked_fill_(self._hidden, float("-inf"))
        return torch.matmul(scores.softmax(dim=-1), value)

    def _fused(self) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(
            self._query, self._key, self._value, is_causal=self._shapes.causal, enable_gqa=self._group > 1
        )

    @property
    def _scale(self) -> float:
        return float(self._shapes.head_size**-0.5)

    def _needed(self) -> int:
        """Bytes of the tensors, and for the standard implementation of two matrices of scores and the mask."""
        shapes, width = self._shapes, WIDTHS[self._shapes.dtype]
        rows = shapes.batch_size * self._length * shapes.head_size * width
        fused = rows * (2 * shapes.heads + 2 * self._kv_heads)
        if self._implementation == "fused":
            return fused
        repeated = 2 * rows * shapes.heads if self._group > 1 else 0
        scores = 2 * shapes.batch_size * shapes.heads * self._length**2 * width
        return fused + repeated + scores + (2 * self._length**2 if shapes.causal else 0)

    def _require_kernel(self) -> None:
        """PyTorch falls back to the standard implementation in silence; it is asked once for a kernel alone."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self._implementation == "standard":
            return
        kernels = [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
        ]
        try:
            with sdpa_kernel(kernels):
                self._fused()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise UnsupportedError(
                f"PyTorch has no fused attention kernel for {self._shapes.dtype} with heads of "
                f"{self._shapes.head_size}{' in groups' if self._group > 1 else ''} on this "
                f"{self._runtime.device}; ask for float16 or bfloat16, or for other heads."
            ) from error

    def _error_over_bound(self, result: Any, batch: int, head: int, index: int) -> float:
        """The largest error of one row's elements over what rounding explains.

        With u = 2^-24 for sums in float32 and v the rounding of the dtype, a score s is off by at most
        e = d u |q||k| / sqrt(d) + 3 v |s|, a weight of the softmax by the factor exp(2 e), and the sums by n u (Higham,
        Accuracy and Stability of Numerical Algorithms, 2002, sections 3.1 and 3.5); a result is rounded to the dtype.
        """
        seen = index + 1 if self._shapes.causal else self._length
        query = self._query[batch, head, index].double()
        key, value = (
            tensor[batch, head // self._group, :seen].double() for tensor in (self._key, self._value)
        )
        scores = key @ query * self._scale
        weights = scores.softmax(dim=-1)
        unit, rounding, least = 2.0**-24, ROUNDING[self._shapes.dtype], UNDERFLOW[self._shapes.dtype]
        size = key.abs() @ query.abs() * self._scale
        score = float((self._shapes.head_size * unit * size + 3 * rounding * scores.abs()).max()) + 2 * least
        expected = weights @ value
        slack = math.expm1(2 * score) + 2 * seen * unit + 3 * rounding
        bound = slack * (weights @ value.abs()) + rounding * expected.abs()
        bound += least * (1 + value.abs().sum(dim=0))
        return float(((result[batch, head, index].double() - expected).abs() / bound).max())
