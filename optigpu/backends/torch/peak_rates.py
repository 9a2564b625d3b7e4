"""The machine's peak rates: how fast it reads, copies and multiplies matrices through torch's operators.

Bandwidth is measured as STREAM does (McCalpin, Memory Bandwidth and Machine Balance, 1995): arrays of at least four
times the last cache, bytes counted once for each read and write that the program asks for. Smaller arrays are read as
well, since a small model's weights stay in a cache. All figures are medians of repetitions after a first call.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from optigpu.backends.torch.clock import Clock, calls_s
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.memory import free_bytes
from optigpu.documents.peaks import Peaks, ReadRate
from optigpu.hardware.cpu_caches import last_level_cache_bytes
from optigpu.vocabulary import DeviceKind, utc_now

SAMPLE_S = 0.005
"""A sample repeats the work for at least this long, so that the cost of the clock and of launches is negligible."""
SAMPLES = (3, 15)
"""The fewest and the most samples of a median; fewer if they take far longer than planned."""
READ_S, COPY_S, MATMUL_S = 0.08, 0.2, 0.4
"""Time to spend on each array size, on copying, and on each dtype."""
MOST_TIMES_PLANNED = 4
"""At most this many times the planned time is spent on a slow or busy machine."""
SMALLEST_ARRAY_BYTES, LEAST_LARGEST_ARRAY_BYTES, MOST_LARGEST_ARRAY_BYTES = 2**20, 2**28, 2**31
"""Bytes of the smallest array, and the bounds of the largest one."""
LARGEST_MEMORY_SHARE = 0.25
"""The largest array takes at most this share of the free memory."""
MATRIX_SIDES = (256, 512, 1024, 2048, 4096, 8192)
"""Sides of the square matrices: they grow until a product takes long enough to show the full rate."""
LONG_S = 0.025

DTYPES: dict[DeviceKind, tuple[str, ...]] = {
    DeviceKind.CPU: ("float32", "bfloat16", "float16", "int8"),
    DeviceKind.CUDA: ("float32", "tf32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
}
"""Dtypes of matrix products by device, as torch names them; tf32 is float32 rounded in NVIDIA's tensor cores."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second: of reading, by the array's bytes in rising order; of copying, both read and written."""

    reads: dict[int, float]
    copy_bytes_per_s: float


def measured_peaks(device: DeviceKind, threads: int) -> Peaks:
    """All peak rates. `threads` is the number of threads that torch uses.

    Raises UnsupportedError when there is no such device.
    """
    found = bandwidth(device)
    rates, reasons = matmul_rates(device)
    return Peaks(
        device=device,
        threads=threads,
        measured_at=utc_now(),
        torch=torch.__version__,
        reads=tuple(ReadRate(array_bytes=size, bytes_per_s=rate) for size, rate in found.reads.items()),
        copy_bytes_per_s=found.copy_bytes_per_s,
        matmul_flops_per_s=rates,
        reasons=reasons,
    )


def bandwidth(device: DeviceKind) -> Bandwidth:
    """How fast arrays are read and copied. A read is a sum over float32: one pass, nothing written.

    Raises UnsupportedError when there is no such device.
    """
    clock = TorchDevice(device, seed=0).clock
    largest = _largest_bytes(device)
    array = torch.ones(largest // 4, dtype=torch.float32, device=device.value)
    reads = {}
    for size in _sizes(largest):
        part = array[: size // 4]
        reads[size] = size / _typical_s(part.sum, clock, READ_S)
    half = array.numel() // 2
    target, source = array[:half], array[half : 2 * half]
    copy_s = _typical_s(lambda: target.copy_(source), clock, COPY_S)
    return Bandwidth(reads, 2 * half * 4 / copy_s)


def matmul_rates(device: DeviceKind) -> tuple[dict[str, float], dict[str, str]]:
    """The best rate of square matrix products for each dtype in operations per second, and why a dtype has none.

    A product of side n counts 2 n^3. Raises UnsupportedError when there is no such device.
    """
    clock = TorchDevice(device, seed=0).clock
    rates, reasons = {}, {}
    for dtype in DTYPES[device]:
        try:
            rates[dtype] = _matmul_rate(device, dtype, clock)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            reasons[dtype] = f"torch cannot multiply {dtype} here: {str(error).strip().splitlines()[0]}"
    return rates, reasons


def _matmul_rate(device: DeviceKind, dtype: str, clock: Clock) -> float:
    until = time.monotonic() + MATMUL_S
    rates = []
    for side in MATRIX_SIDES:
        product_s = _typical_s(_product(device, dtype, side), clock, MATMUL_S / len(MATRIX_SIDES))
        rates.append(2 * side**3 / product_s)
        if product_s > LONG_S or time.monotonic() > until:
            break
    return max(rates)


def _product(device: DeviceKind, dtype: str, side: int) -> Callable[[], object]:
    """A product of two square matrices of that side, ready to be called again and again."""
    shape, place = (side, side), device.value
    if dtype == "int8":
        a, b = (torch.randint(-127, 128, shape, dtype=torch.int8, device=place) for _ in range(2))
        return lambda: torch._int_mm(a, b.T)
    if dtype == "float8_e4m3fn":
        a, b = (torch.randn(shape, device=place).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=place)
        return lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    storage = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    a, b = (torch.randn(shape, device=place).to(storage) for _ in range(2))
    c = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=c)


def _typical_s(work: Callable[[], object], clock: Clock, seconds: float) -> float:
    """Median seconds of one call, over samples of at least SAMPLE_S, for about `seconds` in all."""
    calls_s(work, 1, clock)  # the first pays for memory and for choosing a kernel
    calls = max(1, math.ceil(SAMPLE_S / calls_s(work, 1, clock)))
    fewest, most = SAMPLES
    samples = [calls_s(work, calls, clock)]
    while len(samples) < most and sum(samples) < (
        seconds if len(samples) >= fewest else MOST_TIMES_PLANNED * seconds
    ):
        samples.append(calls_s(work, calls, clock))
    return statistics.median(samples) / calls


def _sizes(largest: int) -> list[int]:
    """Bytes from SMALLEST_ARRAY_BYTES on, each twice the one before, and `largest`."""
    steps = range(int(math.log2(largest / SMALLEST_ARRAY_BYTES)) + 1)
    return sorted({*(SMALLEST_ARRAY_BYTES * 2**step for step in steps), largest})


def _largest_bytes(device: DeviceKind) -> int:
    """Four times the last cache, within what the memory allows; a multiple of SMALLEST_ARRAY_BYTES."""
    if device is DeviceKind.CUDA:
        cache = torch.cuda.get_device_properties(0).L2_cache_size
    else:
        cache = last_level_cache_bytes() or 0
    allowed = int(LARGEST_MEMORY_SHARE * free_bytes(device))
    wanted = min(max(4 * cache, LEAST_LARGEST_ARRAY_BYTES), MOST_LARGEST_ARRAY_BYTES, allowed)
    return max(wanted // SMALLEST_ARRAY_BYTES, 1) * SMALLEST_ARRAY_BYTES
