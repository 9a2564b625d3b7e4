"""Operators by themselves: equal calls, as many to a sample as the clock needs, of arrays that fit the memory."""

import math
from collections.abc import Callable
from typing import Any, Literal

from optigpu.hardware.memory import free_host_bytes
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.base import Runtime

Dtype = Literal["float32", "float16", "bfloat16"]

SAMPLE_S = 0.005
"""A sample is a batch of calls of at least this duration, so that reading the clock (under 1 us) is nothing."""
_LONG = 20
"""A first call of so many samples' duration makes a sample by itself, however much of it was starting up."""
CHECKED = 16
"""Rows of a result that are compared with a float64 reference."""
ROUNDING: dict[str, float] = {
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Unit roundoff of each dtype."""
UNDERFLOW: dict[str, float] = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""How far off a number too small for all of its digits may be: half of the smallest one of the dtype."""
WIDTHS: dict[str, int] = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""


class Calls:
    """Equal calls of one operator, `count` of them to a sample."""

    def __init__(self, runtime: Runtime, call: Callable[[], Any]) -> None:
        """Finds out how many make a sample, by calling it a few times."""
        self._runtime, self._call = runtime, call
        self.count = 1
        self.count = self._to_a_sample()

    def sample_s(self) -> float:
        """Seconds of one batch of calls."""
        marks = [self._runtime.clock.mark()]
        for _ in range(self.count):
            self._call()
        marks.append(self._runtime.clock.mark())
        return self._runtime.clock.seconds(marks)[0]

    def mean_s(self) -> float:
        """Seconds of a call, the mean over one batch."""
        return self.sample_s() / self.count

    def _to_a_sample(self) -> int:
        if self.sample_s() > _LONG * SAMPLE_S:
            return 1
        once_s = min(self.sample_s() for _ in range(3))
        return max(1, math.ceil(SAMPLE_S / once_s))


def require_memory(device: DeviceKind, needed: int, what: str) -> None:
    """Raises UnsupportedError when `needed` bytes for `what` are more than the device has free."""
    free = _free_bytes(device)
    if needed > free:
        raise UnsupportedError(
            f"{what} need {needed / 1e9:.1f} GB and this {device} has {free / 1e9:.1f} GB free; ask for a smaller size."
        )


def _free_bytes(device: DeviceKind) -> int:
    if device is DeviceKind.CUDA:
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return free_host_bytes()
