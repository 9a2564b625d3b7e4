"""matmul: square matrix products, the hardware's own speed limit."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from optigpu.backends.operators import OperatorRuntime
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.vocabulary import Task, UnsupportedError
from optigpu.workloads.base import OperatorShape, Workload
from optigpu.workloads.requests import (
    FLOAT32_ROUNDOFF,
    ROUNDING,
    WIDTHS,
    OperatorRequest,
    checked_rows,
    largest,
    require_memory,
)

Dtype = Literal["float32", "tf32", "float16", "bfloat16"]


class Matmul(Workload):
    """C = A B with square matrices of random normal numbers, for each size and each dtype."""

    summary: ClassVar[str] = "square matrix products, in TFLOP/s, for each size and dtype"
    primary: ClassVar[str] = "tflops"
    metrics: ClassVar[tuple[str, ...]] = ("latency_s", "tflops")
    task: ClassVar[Task] = Task.OPERATOR
    lists: ClassVar[tuple[str, ...]] = ("dtypes", "sizes")

    kind: Literal["matmul"] = "matmul"
    sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = Field(
        (1024, 2048), min_length=1, max_length=16, description="Sides of the matrices."
    )
    dtypes: tuple[Dtype, ...] = Field(
        ("float32",), min_length=1, max_length=4, description="Dtypes to measure."
    )

    @property
    def label(self) -> str:
        return f"{'/'.join(self.dtypes)} {'/'.join(map(str, self.sizes))}"

    @property
    def work_shape(self) -> OperatorShape:
        """Both operands are read and the product is written once."""
        (size,), (dtype,) = self.sizes, self.dtypes
        flops = 2 * size**3
        moved = 3 * size**2 * WIDTHS[dtype]
        return OperatorShape("product", dtype, moved, units=flops / 1e12, matmul_flops=flops)

    def prepare(self, runtime: OperatorRuntime) -> "MatmulRequest":
        """Draws both matrices from the runtime's seed. Raises UnsupportedError for tf32 on a device without it, and
        for matrices that do not fit the free memory."""
        (size,), (dtype,) = self.sizes, self.dtypes
        reason = KINDS[runtime.device].lacks.get(Ability.TF32) if dtype == "tf32" else None
        if reason:
            raise UnsupportedError(f"There is no tf32 on {runtime.device}: {reason}; ask for float32.")
        return MatmulRequest(runtime, size, dtype)


class MatmulRequest(OperatorRequest):
    """Equal products, each written over the last."""

    noun: ClassVar[str] = "product"

    def __init__(self, runtime: OperatorRuntime, size: int, dtype: Dtype) -> None:
        require_memory(runtime, 3 * size**2 * WIDTHS[dtype], f"three {size} x {size} {dtype} matrices")
        self.operator = runtime.matmul(size, dtype)
        self._size, self._dtype = size, dtype
        super().__init__(runtime, self.operator, 2 * size**3)

    def error_over_bound(self) -> float:
        """Of a block of the product.

        The bound is (n u + 4 v) |A||B| element by element, u = 2^-24 for sums in float32 and v the rounding of what
        goes in and comes out (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5).
        """
        block = self.operator.block(checked_rows(self._size))
        error = np.abs(block.product - block.rows @ block.columns)
        size = np.abs(block.rows) @ np.abs(block.columns)
        return largest(error / ((self._size * FLOAT32_ROUNDOFF + 4 * ROUNDING[self._dtype]) * size))
