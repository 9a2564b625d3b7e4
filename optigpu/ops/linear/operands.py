"""What every operator of this folder checks of its operands, before it reads memory."""

import torch

from optigpu.ops.naming import named


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
