"""MemoryOptimizer: what memory is in use, and forward passes that keep no more than they need."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from optigpu.facade.benchmark_result import MEBIBYTE
from optigpu.facade.in_process import device_of
from optigpu.hardware import best_device, probe
from optigpu.hardware.cgroup import free_host_bytes
from optigpu.meters.memory import ResidentPeak
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError

AutocastDtype = Literal["auto", "none", "bfloat16", "float16"]


@dataclass(frozen=True)
class MemoryStats:
    """Bytes in use by this process: on the host, and on the GPU by torch's allocator (None where torch uses none)."""

    host_bytes: int
    host_free_bytes: int
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_peak_bytes: int | None = None

    def __str__(self) -> str:
        host = f"host {_mb(self.host_bytes)}, {_mb(self.host_free_bytes)} free"
        if self.gpu_allocated_bytes is None or self.gpu_reserved_bytes is None or self.gpu_peak_bytes is None:
            return f"{host}; no GPU memory in use"
        return (
            f"{host}; GPU {_mb(self.gpu_allocated_bytes)} allocated, {_mb(self.gpu_reserved_bytes)} reserved, "
            f"{_mb(self.gpu_peak_bytes)} peak"
        )


class MemoryOptimizer:
    """What the memory techniques do, around the caller's own code.

    >>> import torch
    >>> from optigpu import MemoryOptimizer
    >>> MemoryOptimizer.print_stats("before")  # doctest: +ELLIPSIS
    before: host ... MB, ... MB free; ...
    >>> with MemoryOptimizer.optimized_inference(device="cpu"):
    ...     output = torch.nn.Linear(4, 2)(torch.zeros(1, 4))
    >>> output.requires_grad, output.is_inference()
    (False, True)
    """

    @staticmethod
    def stats() -> MemoryStats:
        """What this process uses now. Loads no torch: without it there is nothing on a GPU."""
        resident = ResidentPeak()
        resident.look()
        host = MemoryStats(resident.peak_bytes, free_host_bytes())
        if "torch" not in sys.modules:
            return host
        import torch

        if not torch.cuda.is_available():
            return host
        return MemoryStats(
            host.host_bytes,
            host.host_free_bytes,
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            torch.cuda.max_memory_allocated(),
        )

    @staticmethod
    def print_stats(label: str = "memory") -> None:
        """Prints `stats()` after the label."""
        print(f"{label}: {MemoryOptimizer.stats()}")

    @staticmethod
    @contextmanager
    def optimized_inference(*, device: str | None = None, autocast: AutocastDtype = "auto") -> Iterator[None]:
        """Runs what is in the block without gradients, as the techniques `inference_mode` and `autocast` do.

        "auto" is float16 on a GPU and none on a CPU, where converting weights costs more than it saves. With autocast
        the block runs under torch.no_grad: in inference mode torch would convert the weights again for each product. It
        keeps the conversions of weights that require gradients until the block ends. What inference mode makes can
        never be used in training.

        Raises SpecError for another dtype or device, UnsupportedError for float16 on a CPU.
        """
        if autocast not in get_args(AutocastDtype):
            raise SpecError(
                f"There is no autocast to {autocast!r}; choose one of {', '.join(get_args(AutocastDtype))}."
            )
        kind = best_device() if device is None else device_of(device)
        technique = _technique(autocast, kind)
        problem = technique.check(probe(), kind, None)
        if problem:
            raise UnsupportedError(problem)
        from optigpu.backends.torch.modes import mode_of
        from optigpu.backends.torch.stack import mode_options

        with mode_of(mode_options((technique,)), kind)():
            yield


def _technique(autocast: AutocastDtype, device: DeviceKind) -> Technique:
    if autocast == "none" or (autocast == "auto" and device is DeviceKind.CPU):
        return InferenceMode()
    return Autocast(dtype="float16" if autocast == "auto" else autocast)


def _mb(count: int) -> str:
    return f"{count / MEBIBYTE:,.0f} MB"
