"""normalization: layer norm and RMS norm, with and without the residual's addition before them."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from optigpu.backends.operators import NormRows, NormShape, OperatorRuntime, Wide
from optigpu.workloads.base import OperatorShape
from optigpu.workloads.requests import (
    DTYPE_UNDERFLOW,
    FLOAT32_ROUNDOFF,
    ROUNDING,
    WIDTHS,
    Dtype,
    Implemented,
    OperatorRequest,
    checked_rows,
    largest,
    require_memory,
)

Norm = Literal["layer_norm", "rms_norm"]
Width = Annotated[int, Field(ge=8, le=65536)]

EPSILON = 1e-5


class Normalization(Implemented):
    """The norm of `rows` random rows, for each norm, with and without a residual, each implementation and width.

    "standard" is torch.nn.LayerNorm or torch.nn.RMSNorm, after a separate addition where there is a residual; "fused"
    is add_layer_norm or add_rms_norm of optigpu.ops, which does all of it in one operation. With a residual both the
    sum and its norm are returned, as a transformer's block needs them.
    """

    summary: ClassVar[str] = "layer norm and RMS norm, with and without a residual, separate and fused"
    primary: ClassVar[str] = "gb_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("latency_s", "gb_per_s")
    lists: ClassVar[tuple[str, ...]] = ("widths", "norms", "residuals", "implementations")

    kind: Literal["normalization"] = "normalization"
    norms: tuple[Norm, ...] = Field(
        ("layer_norm", "rms_norm"), min_length=1, max_length=2, description="Which norms to measure."
    )
    residuals: tuple[bool, ...] = Field(
        (False, True), min_length=1, max_length=2, description="Whether a residual is added before the norm."
    )
    widths: tuple[Width, ...] = Field(
        (2048,), min_length=1, max_length=16, description="Lengths of the rows."
    )
    rows: int = Field(2048, ge=1, le=2**24, description="How many rows.")
    dtype: Dtype = Field("float32", description="Dtype of the inputs.")

    @property
    def label(self) -> str:
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
    def shape(self) -> NormShape:
        (width,), (norm,), (residual,) = self.widths, self.norms, self.residuals
        return NormShape(
            norm=norm,
            residual=residual,
            width=width,
            rows=self.rows,
            dtype=self.dtype,
            epsilon=EPSILON,
            fused=self.implementation == "fused",
        )

    @property
    def work_shape(self) -> OperatorShape:
        return OperatorShape("norm", self.dtype, self.bytes, units=self.bytes / 1e9)

    def prepare(self, runtime: OperatorRuntime) -> "NormalizationRequest":
        """Draws the rows and the weights from the runtime's seed. Raises UnsupportedError where they do not fit the
        free memory, and where there is no fused kernel."""
        return NormalizationRequest(runtime, self)


class NormalizationRequest(OperatorRequest):
    """Equal calls."""

    noun: ClassVar[str] = "norm"
    rate: ClassVar[tuple[str, float]] = ("gb_per_s", 1e9)

    def __init__(self, runtime: OperatorRuntime, workload: Normalization) -> None:
        shape = workload.shape
        require_memory(runtime, workload.bytes, f"{shape.rows} rows of {shape.width} {shape.dtype} numbers")
        self._shape = shape
        self.operator = runtime.norm(shape)
        super().__init__(runtime, self.operator, workload.bytes)

    def error_over_bound(self) -> float:
        rows = self.operator.rows(checked_rows(self._shape.rows))
        errors = [norm_error_over_bound(rows, self._shape)]
        if rows.residual is not None:
            expected = rows.rows + rows.residual
            bound = ROUNDING[self._shape.dtype] * np.abs(expected)
            errors.append(np.abs(rows.summed - expected) / np.maximum(bound, 1e-300))
        return largest(*errors)


def norm_error_over_bound(rows: NormRows, shape: NormShape) -> Wide:
    """Each element's error, of the norm of what was summed, over what rounding explains.

    Sums of n numbers in float32 are off by n u at most (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
    section 3.1): the mean, then the deviations from it and their mean square, to first order. The result is rounded to
    the dtype, its product with the weight as well.
    """
    summed, weight = rows.summed, rows.weight
    bias = np.zeros_like(weight) if rows.bias is None else rows.bias
    n, is_layer_norm = shape.width * FLOAT32_ROUNDOFF, shape.norm == "layer_norm"
    mean = summed.mean(axis=1, keepdims=True) * is_layer_norm
    centred = summed - mean
    off = (
        n * np.abs(summed).mean(axis=1, keepdims=True) + FLOAT32_ROUNDOFF * (np.abs(summed) + np.abs(mean))
    ) * is_layer_norm
    square = np.square(centred).mean(axis=1, keepdims=True) + shape.epsilon
    square_off = 2 * (np.abs(centred) * off).mean(axis=1, keepdims=True) + (n + 4 * FLOAT32_ROUNDOFF) * (
        square + np.square(mean)
    )
    scaled = centred * weight / np.sqrt(square)
    bound = np.abs(weight / np.sqrt(square)) * off + np.abs(scaled) * (
        square_off / (2 * square) + 6 * FLOAT32_ROUNDOFF
    )
    bound += 3 * ROUNDING[shape.dtype] * (np.abs(scaled) + np.abs(bias))
    bound += (2 + np.abs(weight)) * DTYPE_UNDERFLOW[shape.dtype]
    error: Wide = np.abs(rows.normed - (scaled + bias)) / bound
    return error
