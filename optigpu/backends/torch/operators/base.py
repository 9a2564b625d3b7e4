"""The base class of the operators: tensors on a device, and timed calls."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from optigpu.backends.torch.clock import calls_s
from optigpu.backends.torch.device import TorchDevice


class TorchOperator(ABC):
    """One operator with its inputs, which are drawn on the device itself from its seed."""

    def __init__(self, place: TorchDevice) -> None:
        self.place = place
        self._source = torch.Generator(place.name).manual_seed(place.seed)

    @abstractmethod
    def call(self) -> object:
        """One call."""

    @abstractmethod
    def held(self) -> Sequence[torch.Tensor]:
        """The tensors that exist before and after a call."""

    @abstractmethod
    def drawn(self) -> Sequence[torch.Tensor]:
        """The tensors that each request draws anew."""

    def seconds(self, calls: int) -> float:
        """Seconds of that many calls, one after the other."""
        return calls_s(self.call, calls, self.place.clock)

    def redraw(self, seed: int) -> None:
        """Fills the same storages with new numbers: further ones might not fit."""
        self._source.manual_seed(seed)
        for tensor in self.drawn():
            tensor.normal_(generator=self._source)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of random normal numbers."""
        return torch.randn(shape, generator=self._source, device=self.place.name, dtype=dtype)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a workload names."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def wide(tensor: torch.Tensor) -> NDArray[np.float64]:
    """The same numbers as float64, to be checked."""
    found: NDArray[np.float64] = tensor.cpu().double().numpy()  # an Apple GPU has no float64
    return found
