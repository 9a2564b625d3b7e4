"""How a refusal names a tensor."""

import torch


def named(tensor: torch.Tensor) -> str:
    """Its type and shape: "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
