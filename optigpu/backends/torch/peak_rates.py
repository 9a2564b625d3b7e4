"""The machine's peak rates: the fastest that it is found to read, copy and multiply.

A peak is the best of repetitions, as STREAM's figures are (McCalpin, Memory Bandwidth and Machine Balance, 1995), and
the best of several ways: torch's operators, and on a CPU the loops of `ops/rates`. Arrays are read in all sizes from
those of a core's own cache to at least four times the last cache; bytes count once for each read and write.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch

from optigpu.backends.torch.device import Clock, TorchDevice, calls_s, free_bytes, last_gpu_cache_bytes
from optigpu.documents.peaks import Peaks, ReadRate
from optigpu.hardware.cpu import last_level_cache_bytes
from optigpu.hardware.device_kinds import torch_name
from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.rates.rates import PRODUCTS, WAYS, RateLoops
from optigpu.vocabulary import DeviceKind, UnsupportedError, utc_now

SWEEPS = 3
"""Everything is measured so many times, one after the other: what disturbs a machine for a while spoils one sweep."""
OPERATOR_SAMPLE_S, LOOP_SAMPLE_S = 0.004, 0.0005
"""A sample repeats the work for at least this long: an operator until the cost of launches is negligible."""
READ_S, COPY_S, MATMUL_S, LOOP_S = 0.005, 0.005, 0.03, 0.03
"""Time to spend in a sweep on each array size and way, on torch's products of each side, and on each loop's."""
LEAST_LARGEST_ARRAY_BYTES, MOST_LARGEST_ARRAY_BYTES = 2**28, 2**31
SMALLEST_TORCH_BYTES, SMALLEST_THREAD_BYTES = 2**20, 2**14
"""Of the smallest array that torch reads, and of a thread's part of the smallest that the loops read."""
LARGEST_MEMORY_SHARE = 0.25
"""The largest array takes at most this share of the free memory."""
MATRIX_SIDES = (256, 512, 1024, 2048, 4096, 8192)
"""Sides of the square matrices: they grow until a product takes long enough to show the full rate."""
LONG_S = 0.025

DTYPES: dict[DeviceKind, tuple[str, ...]] = {
    DeviceKind.CPU: ("float32", "bfloat16", "float16", "int8"),
    DeviceKind.CUDA: ("float32", "tf32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
    **dict.fromkeys((DeviceKind.ROCM, DeviceKind.XPU, DeviceKind.MPS), ("float32", "bfloat16", "float16")),
}
"""Dtypes of matrix products by device, as torch names them; tf32 is float32 rounded in NVIDIA's tensor cores."""
NARROW = ("bfloat16", "float16", "int8", "float8_e4m3fn")
"""Numbers that float32 holds exactly: their products may be computed in float32, and so are at least as fast."""

_log = logging.getLogger(__name__)


Works = tuple[Callable[[], object], Callable[..., float] | None]
"""torch's operator, and the loop that does the same in one of WAYS, if there is one."""


def measured_peaks(device: DeviceKind, threads: int) -> Peaks:
    """All peak rates; `threads` are torch's. Raises UnsupportedError when there is no such device."""
    clock = TorchDevice(device, seed=0).clock
    loops = _loops(device, threads)
    # Four times the last cache, within what the memory allows; a multiple of SMALLEST_TORCH_BYTES.
    on_cpu = device is DeviceKind.CPU
    cache = last_level_cache_bytes() or 0 if on_cpu else last_gpu_cache_bytes(device)
    allowed = int(LARGEST_MEMORY_SHARE * free_bytes(device))
    wanted = min(max(4 * cache, LEAST_LARGEST_ARRAY_BYTES), MOST_LARGEST_ARRAY_BYTES, allowed)
    count = (max(wanted // SMALLEST_TORCH_BYTES, 1) * SMALLEST_TORCH_BYTES) // 4
    if device is DeviceKind.CPU:  # in huge pages, as a decoder's weights are
        array = Arena(4 * count).take((count,), torch.float32).fill_(1)
    else:
        array = torch.ones(count, dtype=torch.float32, device=torch_name(device))
    reads, copies = (
        _rates(array.nbytes, clock, loops, partial(works, array, loops), seconds)
        for works, seconds in ((_reading, READ_S), (_copying, COPY_S))
    )
    del array
    rates, ways, reasons = matmul_rates(device, loops)
    return Peaks(
        device=device,
        threads=threads,
        measured_at=utc_now(),
        torch=torch.__version__,
        reads=reads,
        copies=copies,
        copy_bytes_per_s=copies[-1].bytes_per_s,
        matmul_flops_per_s=rates,
        ways=ways,
        reasons=reasons,
    )


def _reading(array: torch.Tensor, loops: RateLoops | None, size: int) -> Works:
    """Of the first bytes of a float32 array. torch reads it by a sum: one pass, nothing written."""
    part = array[: size // 4]
    return part.sum, partial(loops.read_s, part) if loops else None


def _copying(array: torch.Tensor, loops: RateLoops | None, size: int) -> Works:
    """One half of the first bytes of an array to the other."""
    target, source = array[: size // 8], array[size // 8 : size // 4]
    return partial(target.copy_, source), partial(loops.copy_s, target, source) if loops else None


def matmul_rates(
    device: DeviceKind, loops: RateLoops | None
) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """The best rate of products of each dtype in operations per second, the way to it, and why a dtype has none.

    A product of square matrices of side n counts 2 n^3. Raises UnsupportedError when there is no such device.
    """
    clock = TorchDevice(device, seed=0).clock
    products = {name: _of_loop(partial(loops.multiply_s, name)) for name in PRODUCTS} if loops else {}
    rates: dict[str, float] = {}
    ways, reasons = {}, {}
    for _ in range(SWEEPS):
        for dtype in DTYPES[device]:
            try:
                rate = _matmul_rate(device, dtype, clock)
            except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
                reasons[dtype] = f"torch cannot multiply {dtype} here: {str(error).strip().splitlines()[0]}"
                continue
            if rate > rates.get(dtype, 0.0):
                rates[dtype], ways[dtype] = rate, "torch"
        for way, trial in products.items():
            operations = loops.operations(way) if loops else 0  # 0: this CPU lacks the instructions
            dtype, rate = PRODUCTS[way][0], operations / trial.go_on(LOOP_S) if operations else 0.0
            if rate > rates.get(dtype, 0.0):
                rates[dtype], ways[dtype] = rate, f"loop: {way}"
    for dtype in NARROW:
        if rates.get("float32", 0.0) > rates.get(dtype, math.inf):
            rates[dtype], ways[dtype] = rates["float32"], "computed in float32"
    return rates, ways, {dtype: reason for dtype, reason in reasons.items() if dtype not in rates}


class Trial:
    """The best of all samples of one work: the seconds of so many calls, `least_s` or longer."""

    def __init__(self, sample: Callable[[int], float], least_s: float) -> None:
        self.best_s = math.inf
        self._sample, self._least_s = sample, least_s
        self._calls = 1

    def go_on(self, seconds: float) -> float:
        """Samples for about so long, one of enough calls at least; returns the best of a call until now."""
        until = time.monotonic() + seconds
        while True:
            took_s = self._sample(self._calls)
            self.best_s = min(self.best_s, took_s / self._calls)
            if took_s < self._least_s:
                more = min(10.0, 1.2 * self._least_s / max(took_s, 1e-9))
                self._calls = math.ceil(self._calls * more)
            elif time.monotonic() >= until:
                return self.best_s


def _of_loop(sample: Callable[[int], float]) -> Trial:
    return Trial(sample, LOOP_SAMPLE_S)


def _of_operator(work: Callable[[], object], clock: Clock) -> Trial:
    return Trial(lambda calls: calls_s(work, calls, clock), OPERATOR_SAMPLE_S)


def _rates(
    largest: int, clock: Clock, loops: RateLoops | None, works: Callable[[int], Works], seconds: float
) -> tuple[ReadRate, ...]:
    """The best rate of each size of array; `seconds` are those of a trial in a sweep."""
    trials: dict[int, list[Trial]] = {}
    # Bytes from the smallest size on, each twice the one before, and `largest`.
    smallest = SMALLEST_TORCH_BYTES
    if loops is not None:
        smallest = 2 ** math.ceil(math.log2(SMALLEST_THREAD_BYTES * loops.threads))
    steps = range(int(math.log2(largest / smallest)) + 1) if largest > smallest else range(0)
    for size in sorted({*(smallest * 2**step for step in steps), largest}):
        operator, loop = works(size)
        trials[size] = [_of_loop(partial(loop, way=way)) for way in WAYS] if loop else []
        if size >= SMALLEST_TORCH_BYTES:
            trials[size].append(_of_operator(operator, clock))
    for _ in range(SWEEPS):
        for trial in chain(*trials.values()):
            trial.go_on(seconds)
    return tuple(
        ReadRate(array_bytes=size, bytes_per_s=size / min(trial.best_s for trial in ways))
        for size, ways in trials.items()
    )


def _matmul_rate(device: DeviceKind, dtype: str, clock: Clock) -> float:
    rates = []
    for side in MATRIX_SIDES:
        product_s = _of_operator(_product(device, dtype, side), clock).go_on(MATMUL_S)
        rates.append(2 * side**3 / product_s)
        if product_s > LONG_S:
            break
    return max(rates)


def _product(device: DeviceKind, dtype: str, side: int) -> Callable[[], object]:
    shape, place = (side, side), torch_name(device)
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


def _loops(device: DeviceKind, threads: int) -> RateLoops | None:
    """None on a GPU, and where there is no compiler: torch's operators alone are measured then."""
    if device is not DeviceKind.CPU:
        return None
    try:
        return RateLoops(threads)
    except UnsupportedError as error:
        _log.warning("peak rates are measured by torch's operators alone: %s", error)
        return None
