"""normalization: layer norm and RMS norm, with and without the residual's addition before them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

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

Norm = Literal["layer_norm", "rms_norm"]
Implementation = Literal["standard", "fused"]
Width = Annotated[int, Field(ge=8, le=65536)]

EPSILON = 1e-5
UNIT = 2.0**-24
"""The rounding of float32, in which all of them compute."""


class Normalization(Workload):
    """The norm of `rows` random rows, for each norm, with and without a residual, each implementation and width.

    "standard" is torch.nn.LayerNorm or torch.nn.RMSNorm, after a separate addition where there is a residual; "fused"
    is add_layer_norm or add_rms_norm of optigpu.ops, which does all of it in one operation. With a residual both the
    sum and its norm are returned, as a transformer's block needs them.
    """

    summary: ClassVar[str] = "layer norm and RMS norm, with and without a residual, separate and fused"
    primary: ClassVar[str] = "gb_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("latency_s", "gb_per_s")
    needs_model: ClassVar[bool] = False

    kind: Literal["normalization"] = "normalization"
    norms: tuple[Norm, ...] = Field(("layer_norm", "rms_norm"), min_length=1, max_length=2)
    residuals: tuple[bool, ...] = Field((False, True), min_length=1, max_length=2)
    implementations: tuple[Implementation, ...] = Field(("standard", "fused"), min_length=1, max_length=2)
    widths: tuple[Width, ...] = Field((2048,), min_length=1, max_length=16)
    rows: int = Field(2048, ge=1, le=2**24)
    dtype: Dtype = "float32"

    def expand(self) -> tuple[Workload, ...]:
        """One workload for each width, norm, residual and implementation."""
        singles = product(self.widths, self.norms, self.residuals, self.implementations)
        return tuple(
            self.model_copy(
                update={
                    "widths": (width,),
                    "norms": (norm,),
                    "residuals": (residual,),
                    "implementations": (implementation,),
                }
            )
            for width, norm, residual, implementation in singles
        )

    @property
    def label(self) -> str:
        """For example "fused rms_norm with residual 2048"; lists are joined while they are not expanded."""
        both = " with and without residual"
        residual = both if len(set(self.residuals)) > 1 else " with residual" if self.residuals[0] else ""
        widths = "/".join(map(str, self.widths))
        return f"{'/'.join(self.implementations)} {'/'.join(self.norms)}{residual} {widths}"

    @property
    def bytes(self) -> int:
        """The least that has to be moved: every input read once and every result written once."""
        (width,), (norm,), (residual,) = self.widths, self.norms, self.residuals
        vectors = 2 if norm == "layer_norm" else 1
        matrices = 4 if residual else 2
        return (matrices * self.rows + vectors) * width * WIDTHS[self.dtype]

    @property
    def work_shape(self) -> OperatorShape:
        """A norm has no matrix product."""
        return OperatorShape("norm", self.dtype, self.bytes, units=self.bytes / 1e9)

    def prepare(self, runtime: Runtime) -> "NormalizationRequest":
        """Draws the rows and the weights from the runtime's seed and finds out how many calls make a sample.

        Raises UnsupportedError where they do not fit the free memory, and where there is no fused kernel.
        """
        return NormalizationRequest(runtime, self)


class NormalizationRequest:
    """One batch of equal calls."""

    def __init__(self, runtime: Runtime, shapes: Normalization) -> None:
        import torch

        (self._width,), (self._norm,), (has_residual,) = shapes.widths, shapes.norms, shapes.residuals
        self._shapes = shapes
        require_memory(
            runtime.device, shapes.bytes, f"{shapes.rows} rows of {self._width} {shapes.dtype} numbers"
        )
        device, dtype = runtime.device.value, getattr(torch, shapes.dtype)
        self._source = torch.Generator(device).manual_seed(runtime.seed)

        def draw(*shape: int) -> Any:
            return torch.randn(shape, generator=self._source, device=device, dtype=dtype)

        self._rows = draw(shapes.rows, self._width)
        self._residual = draw(shapes.rows, self._width) if has_residual else None
        self._weight = draw(self._width)
        self._bias = draw(self._width) if self._norm == "layer_norm" else None
        (implementation,) = shapes.implementations
        self._apply = self._standard() if implementation == "standard" else self._fused(runtime)
        self._calls = Calls(runtime, self.call)
        runtime.notes.record(calls_per_sample=self._calls.count)

    def run(self) -> Mapping[str, float]:
        """The mean over one batch of calls."""
        latency_s = self._calls.mean_s()
        return {"latency_s": latency_s, "gb_per_s": self._shapes.bytes / latency_s / 1e9}

    def call(self) -> Any:
        """One call: the norm, and the sum that it is of, both [rows, width]."""
        return self._apply(self._rows, self._residual)

    @property
    def held(self) -> Sequence[Any]:
        """The inputs."""
        tensors = (self._rows, self._residual, self._weight, self._bias)
        return [tensor for tensor in tensors if tensor is not None]

    def check(self) -> Check:
        """Compares a few rows with a float64 reference, within the worst rounding that the dtype allows."""
        import torch

        request_s = self._calls.sample_s()
        normed, summed = self.call()
        places = torch.linspace(0, self._shapes.rows - 1, CHECKED, device=normed.device).long()
        worst = max(self._sum_error(summed, places), self._norm_error(normed, summed, places))
        if not worst <= 1:
            problem = f"The norm is wrong: an element is off by {worst:.3g} times the dtype's worst rounding."
            return Check(request_s, problem)
        return Check(request_s, details={"error_over_bound": worst})

    def observe(self) -> None:
        """Nothing is recorded beyond what `prepare` noted."""

    def described(self) -> Mapping[str, Sequence[float]]:
        """A call has no parts."""
        return {}

    def fresh(self) -> "NormalizationRequest":
        """The same storages, filled anew: other ones might not fit."""
        for tensor in (self._rows, self._residual):
            if tensor is not None:
                tensor.normal_(generator=self._source)
        return self

    def _standard(self) -> Callable[[Any, Any], Any]:
        import torch

        kind: Any = torch.nn.LayerNorm if self._norm == "layer_norm" else torch.nn.RMSNorm
        module = kind(self._width, eps=EPSILON, device=self._rows.device, dtype=self._rows.dtype)
        module.requires_grad_(False).weight.copy_(self._weight)
        if self._bias is not None:
            module.bias.copy_(self._bias)

        def apply(rows: Any, residual: Any) -> Any:
            summed = rows if residual is None else rows + residual
            return module(summed), summed

        return apply

    def _fused(self, runtime: Runtime) -> Callable[[Any, Any], Any]:
        from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, norm_backend

        backend = norm_backend(self._rows.device)
        if backend == "torch":
            raise UnsupportedError(
                f"There is no fused norm on this {runtime.device}: it needs a C++ compiler on a CPU and Triton on "
                "CUDA; ask for the standard implementation."
            )
        runtime.notes.record(norm_backend=backend)
        if self._norm == "layer_norm":
            return lambda rows, residual: add_layer_norm(rows, residual, self._weight, self._bias, EPSILON)
        return lambda rows, residual: add_rms_norm(rows, residual, self._weight, EPSILON)

    def _sum_error(self, summed: Any, places: Any) -> float:
        """The largest error of the sum over what its rounding explains."""
        if self._residual is None:
            return 0.0
        expected = self._rows[places].double() + self._residual[places].double()
        bound = ROUNDING[self._shapes.dtype] * expected.abs()
        return float(((summed[places].double() - expected).abs() / bound.clamp_min(1e-300)).max())

    def _norm_error(self, normed: Any, summed: Any, places: Any) -> float:
        """The largest error of the norm of what was summed over what rounding explains.

        Sums of n numbers in float32 are off by n u at most (Higham, Accuracy and Stability of Numerical Algorithms,
        2002, section 3.1): the mean, then the deviations from it and their mean square, to first order. The result is
        rounded to the dtype, its product with the weight as well.
        """
        import torch

        rows, weight = summed[places].double(), self._weight.double()
        bias = torch.zeros_like(weight) if self._bias is None else self._bias.double()
        n, is_layer_norm = self._width * UNIT, self._norm == "layer_norm"
        mean = rows.mean(dim=1, keepdim=True) * is_layer_norm
        centred = rows - mean
        off = (n * rows.abs().mean(dim=1, keepdim=True) + UNIT * (rows.abs() + mean.abs())) * is_layer_norm
        square = centred.square().mean(dim=1, keepdim=True) + EPSILON
        square_off = 2 * (centred.abs() * off).mean(dim=1, keepdim=True) + (n + 4 * UNIT) * (
            square + mean.square()
        )
        scaled = centred * weight / square.sqrt()
        expected = scaled + bias
        bound = (weight / square.sqrt()).abs() * off + scaled.abs() * (square_off / (2 * square) + 6 * UNIT)
        bound += 3 * ROUNDING[self._shapes.dtype] * (scaled.abs() + bias.abs())
        bound += (2 + weight.abs()) * UNDERFLOW[self._shapes.dtype]
        return float(((normed[places].double() - expected).abs() / bound).max())
