"""What every runtime of the torch backend has. Loads no transformers, which takes seconds and operators do not need.

Named ranges (NVTX) on CUDA's time line are for an external profiler such as Nsight Systems.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from optigpu.backends.runtime import MemoryPeaks, Profile
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.memory import peaks_of
from optigpu.backends.torch.profile import profiled
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import Footprint, ImageFootprint
from optigpu.vocabulary import DeviceKind


class TorchRuntime:
    """The methods that need no model. `place` is the device; a profiler replaces its clock."""

    def __init__(self, place: TorchDevice) -> None:
        self._place = place
        self.device = place.device
        self.seed = place.seed
        self.notes = place.notes

    def weights(self) -> WeightFacts | None:
        """None: there is no model."""
        return None

    def footprint(self) -> Footprint | ImageFootprint | None:
        """None: there is no model."""
        return None

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """The peaks of CUDA's allocator while `run` ran."""
        return peaks_of(run, self.device)

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """The kernels that torch's profiler saw while `run` ran."""
        return profiled(self._place, run, steps, trace)

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """An NVTX range on CUDA."""
        return nvtx_range(name, self.device)


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
