"""Operands of the operators: how errors and tables describe a tensor, what is checked of it, and ranges of integers."""

import torch

INT8_LARGEST = 127
"""Symmetric: -128 is not used."""
INT4_LEAST, INT4_LARGEST = -8, 7
"""The range of 4-bit numbers once INT4_ZERO is subtracted."""
INT4_ZERO = 8
"""The stored 4-bit number, from 0 to 15, that represents zero (plus the offset of its group)."""


def named(tensor: torch.Tensor) -> str:
    """The type and shape of a tensor: "float32 [2, 3]"."""
    return f"{type_name(tensor.dtype)} {list(tensor.shape)}"


def type_name(dtype: torch.dtype) -> str:
    """A type as torch writes it, without torch's own name: "float32"."""
    return str(dtype).removeprefix("torch.")


def filled(tensor: torch.Tensor, unit: int, value: int = 0) -> torch.Tensor:
    """`tensor` with more outputs (the first dimension), up to a multiple of `unit`."""
    missing = -tensor.shape[0] % unit
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)]) if missing else tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number of a tensor is NaN or infinite. Its least and largest are found many times faster than a truth
    value of each."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in tensor.aminmax())


def check_activations(x: torch.Tensor, operator: str) -> None:
    """Raises ValueError unless x is float32, bfloat16 or float16 [..., inner]."""
    if x.dim() == 0 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{operator} needs float32, bfloat16 or float16 activations [..., inner], not {named(x)}."
        )


def check_bias(bias: torch.Tensor | None, outputs: int, operator: str) -> None:
    """Raises ValueError unless the bias is float32 [outputs] or missing."""
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (outputs,)):
        raise ValueError(f"{operator} needs one float32 bias per output, not {named(bias)}.")


def linear_fake(  # in the order of the operators
    x: torch.Tensor,
    packed: torch.Tensor,  # noqa: ARG001
    scale: torch.Tensor,
    *_: object,
    **__: object,
) -> torch.Tensor:
    """What torch.compile learns of the result of an operator with a scale for each output."""
    return x.new_empty((*x.shape[:-1], scale.shape[0]))
