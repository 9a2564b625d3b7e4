"""Where tensors lie in memory, and how many bytes that takes. It needs no transformers: operators are measured so."""

from collections.abc import Iterable

import torch


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage by its address; what is shared is there once."""
    return {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory: the same for what is tied and for views."""
    return tensor.untyped_storage().data_ptr()
