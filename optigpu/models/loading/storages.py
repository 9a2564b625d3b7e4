"""Where tensors lie in memory, and how many bytes that takes."""

from collections.abc import Iterable

import torch


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage by its address; what is shared is there once."""
    return {address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def address(tensor: torch.Tensor) -> int:
    """Of the storage behind a tensor."""
    return int(tensor.untyped_storage().data_ptr())
