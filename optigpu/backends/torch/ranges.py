"""Named ranges (NVTX) on CUDA's time line, for an external profiler such as Nsight Systems."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from optigpu.vocabulary import DeviceKind


@contextmanager
def nvtx_range(name: str, device: DeviceKind) -> Iterator[None]:
    """Names what happens within; nothing on another device. It ends where it began, after an error as well.

    Without a profiler a range costs two calls into an empty library. Source: torch.cuda.nvtx, NVIDIA Tools Extension.
    """
    if device is not DeviceKind.CUDA:
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
