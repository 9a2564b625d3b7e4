"""How error messages describe a tensor."""

import torch


def named(tensor: torch.Tensor) -> str:
    """The type and shape of a tensor: "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
