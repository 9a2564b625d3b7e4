"""A torch device with its clock."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from optigpu.backends.torch.clock import clock_for
from optigpu.techniques.base import Notes
from optigpu.vocabulary import DeviceKind, UnsupportedError


class TorchDevice:
    """A device, the clock that times it, the seed that its numbers are drawn from, and what is noted on the way.

    A profiler takes the place of `clock` for as long as it records.
    """

    def __init__(self, device: DeviceKind, seed: int) -> None:
        """Raises UnsupportedError when torch finds no such device."""
        _require(device)
        self.device = device
        self.seed = seed
        self.clock = clock_for(device)
        self.notes = Notes({"threads": torch.get_num_threads()})
        self._moved: tuple[NDArray[Any], torch.Tensor] | None = None

    def tensor(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The array on the device.

        The last one is remembered, so that a request that is repeated does not copy its inputs again.
        """
        if self._moved is None or self._moved[0] is not array:
            made = torch.from_numpy(np.ascontiguousarray(array)).to(self.device.value, dtype)
            self._moved = (array, made)
        return self._moved[1]


def _require(device: DeviceKind) -> None:
    if device is DeviceKind.CUDA and not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        raise UnsupportedError(
            f"torch {torch.__version__} (built for {built}) finds no CUDA device; install a CUDA build of torch and "
            "its driver, or ask for device cpu."
        )
