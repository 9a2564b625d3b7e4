"""How error messages and tables describe a tensor."""

import torch


def named(tensor: torch.Tensor) -> str:
    """The type and shape of a tensor: "float32 [2, 3]"."""
    return f"{type_name(tensor.dtype)} {list(tensor.shape)}"


def type_name(dtype: torch.dtype) -> str:
    """A type as torch writes it, without torch's own name: "float32"."""
    return str(dtype).removeprefix("torch.")
