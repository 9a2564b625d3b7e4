"""simulate_matmul: how long a matrix product takes at least, predicted from a rate and never measured."""

from math import isfinite
from typing import NamedTuple

from optigpu.hardware.catalog import Dtype, HardwareKind, devices
from optigpu.vocabulary import SpecError

KINDS = (HardwareKind.CPU, HardwareKind.GPU, HardwareKind.TPU)


class MatmulPrediction(NamedTuple):
    """A prediction: the operations of a product, and the seconds that a device takes that always runs at its rate."""

    flops: int
    seconds: float

    def __str__(self) -> str:
        return f"prediction: {self.flops / 1e9:.4g} GFLOP in {self.seconds * 1e3:.4g} ms at least"


class PredictedDevice(NamedTuple):
    """A device of the catalog with the prediction at its published (or derived) peak rate; `source` is the rate's."""

    name: str
    kind: HardwareKind
    gflops: float
    prediction: MatmulPrediction
    source: str


def simulate_matmul(size: int, device_gflops: float) -> MatmulPrediction:
    """Predicts a product of two square matrices with sides of `size`; `device_gflops` are 10**9 operations a second.

    A multiplication and an addition are two operations, so that there are 2 * size**3. A real product takes longer;
    `optigpu.run("matmul")` measures it. Raises SpecError for a size below 1 and a rate that is not positive.

    >>> from optigpu import simulate_matmul
    >>> flops, seconds = simulate_matmul(1000, 800)
    >>> flops, seconds
    (2000000000, 0.0025)
    >>> print(simulate_matmul(1000, 800))
    prediction: 2 GFLOP in 2.5 ms at least
    """
    if size < 1:
        raise SpecError(f"size: a matrix has sides of 1 or more, not {size}.")
    if not (isfinite(device_gflops) and device_gflops > 0):
        raise SpecError(f"device_gflops: {device_gflops} is no rate; name 10**9 operations a second above 0.")
    flops = 2 * size**3
    return MatmulPrediction(flops, flops / (device_gflops * 1e9))


def simulate_matmul_devices(size: int, dtype: Dtype = "fp32") -> tuple[PredictedDevice, ...]:
    """`simulate_matmul` for the CPUs, GPUs and TPUs of the catalog that compute in `dtype`, the slowest first."""
    rows = []
    for each in devices():
        if each.kind in KINDS and (rate := each.peak_flop_per_s.get(dtype, 0.0) / 1e9):
            made = PredictedDevice(each.name, each.kind, rate, simulate_matmul(size, rate), each.source)
            rows.append(made)
    return tuple(sorted(rows, key=lambda row: row.gflops))
