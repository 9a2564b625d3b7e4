"""matmul: square matrix products, the hardware's own speed limit."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.base import Check, Runtime, Workload
from optigpu.workloads.requests.operators import CHECKED, ROUNDING, WIDTHS, Calls, require_memory
from optigpu.workloads.requests.shapes import OperatorShape

Dtype = Literal["float32", "tf32", "float16", "bfloat16"]


class Matmul(Workload):
    """C = A B with square matrices of random normal numbers, for each size and each dtype."""

    summary: ClassVar[str] = "square matrix products, in TFLOP/s, for each size and dtype"
    primary: ClassVar[str] = "tflops"
    metrics: ClassVar[tuple[str, ...]] = ("latency_s", "tflops")
    needs_model: ClassVar[bool] = False

    kind: Literal["matmul"] = "matmul"
    sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = Field(
        (1024, 2048), min_length=1, max_length=16
    )
    dtypes: tuple[Dtype, ...] = Field(("float32",), min_length=1, max_length=4)

    def expand(self) -> tuple[Workload, ...]:
        """One workload for each size and dtype."""
        return tuple(Matmul(sizes=(size,), dtypes=(dtype,)) for dtype in self.dtypes for size in self.sizes)

    @property
    def label(self) -> str:
        """For example "float32 1024"; lists are joined while they are not expanded."""
        return f"{'/'.join(self.dtypes)} {'/'.join(map(str, self.sizes))}"

    @property
    def work_shape(self) -> OperatorShape:
        """Both operands are read and the product is written once."""
        (size,), (dtype,) = self.sizes, self.dtypes
        flops = 2 * size**3
        moved = 3 * size**2 * WIDTHS[dtype]
        return OperatorShape("product", dtype, moved, units=flops / 1e12, matmul_flops=flops)

    def prepare(self, runtime: Runtime) -> "MatmulRequest":
        """Draws both matrices from the runtime's seed and finds out how many products make a sample.

        Raises UnsupportedError for tf32 without CUDA, and for matrices that do not fit the free memory.
        """
        (size,), (dtype,) = self.sizes, self.dtypes
        if dtype == "tf32" and runtime.device is not DeviceKind.CUDA:
            raise UnsupportedError(
                "tf32 is a mode of NVIDIA's tensor cores and a CPU has none; ask for float32."
            )
        return MatmulRequest(runtime, size, dtype)


class MatmulRequest:
    """One batch of equal products, each written over the last."""

    def __init__(self, runtime: Runtime, size: int, dtype: Dtype) -> None:
        import torch

        storage = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        require_memory(
            runtime.device, 3 * size**2 * storage.itemsize, f"three {size} x {size} {dtype} matrices"
        )
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        device = runtime.device.value
        self._source = torch.Generator(device).manual_seed(runtime.seed)
        self._a, self._b = (
            torch.randn(size, size, generator=self._source, device=device, dtype=storage) for _ in range(2)
        )
        self._c = torch.empty_like(self._a)
        self._dtype = dtype
        self._products = Calls(runtime, lambda: torch.mm(self._a, self._b, out=self._c))
        runtime.notes.record(products_per_sample=self._products.count)

    def run(self) -> Mapping[str, float]:
        """The mean over one batch of products."""
        latency_s = self._products.mean_s()
        return {"latency_s": latency_s, "tflops": 2 * self._a.shape[0] ** 3 / latency_s / 1e12}

    def check(self) -> Check:
        """Compares a block of the product with a float64 reference, within the worst rounding that the dtype allows.

        The bound is (n u + 4 v) |A||B| element by element, u = 2^-24 for sums in float32 and v the rounding of what
        goes in and comes out (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5).
        """
        import torch

        request_s = self._products.sample_s()
        rows = torch.linspace(0, self._a.shape[0] - 1, CHECKED, device=self._a.device).long()
        a, b = self._a[rows].double(), self._b[:, rows].double()
        error = (self._c[rows][:, rows].double() - a @ b).abs()
        bound = (self._a.shape[0] * 2.0**-24 + 4 * ROUNDING[self._dtype]) * (a.abs() @ b.abs())
        worst = float((error / bound).max())
        if not worst <= 1:
            problem = (
                f"The product is wrong: an element is off by {worst:.3g} times the dtype's worst rounding."
            )
            return Check(request_s, problem)
        return Check(request_s, details={"error_over_bound": worst})

    def observe(self) -> None:
        """Nothing is recorded beyond what `prepare` noted."""

    def described(self) -> Mapping[str, Sequence[float]]:
        """A product has no parts."""
        return {}

    def fresh(self) -> "MatmulRequest":
        """The same storages, filled anew: other ones might not fit."""
        for matrix in (self._a, self._b):
            matrix.normal_(generator=self._source)
        return self
