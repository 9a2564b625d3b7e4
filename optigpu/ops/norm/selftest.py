"""Checks of the norms with the residual's addition before them, beside norms in float64."""

from functools import partial

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.kernel_check import UNIT, Draw, KernelCheck, cases, compared, half_a_step, share
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, native_norm_reason, norm_backend
from optigpu.vocabulary import DeviceKind, UnsupportedError

SHAPES = ((1, 768), (5, 31), (40, 1000))
EPS = 1e-5


def norm(is_rms: bool, device: DeviceKind) -> Comparison:
    """LayerNorm or RMSNorm."""
    backend = norm_backend(device.value)
    if backend == "torch":
        raise UnsupportedError(native_norm_reason() or "The norms' kernel for CUDA needs Triton; install it.")
    shares = []
    for dtype, rows, width in cases(SHAPES):
        draw = Draw(device, seed=width)
        x, residual = (draw(rows, width, dtype=dtype) for _ in range(2))
        weight, bias = (draw(width, dtype=dtype) for _ in range(2))
        if is_rms:
            normed, summed = add_rms_norm(x, residual, weight, EPS)
        else:
            normed, summed = add_layer_norm(x, residual, weight, bias, EPS)
        shares.append(share(summed, (x + residual).double(), torch.zeros_like(summed, dtype=torch.float64)))
        shares.append(_share(normed, summed, weight, None if is_rms else bias))
    return compared(shares, backend)


def _share(
    normed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> float:
    """Of the norm of what was stored as the sum; without a bias it is an RMSNorm.

    Sums of n terms are off by at most n u of the terms' sizes (Higham, Accuracy and Stability of Numerical Algorithms,
    2002, section 4.2); the root halves what that is of the variance.
    """
    wide, n = summed.double(), summed.shape[-1]
    centred = wide if bias is None else wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + EPS)
    factor = weight.double().abs()
    exact = centred * scale * weight.double()
    off_centre = 0.0 if bias is None else (n + 3) * UNIT * centred.abs().mean(-1, keepdim=True)
    if bias is not None:
        exact = exact + bias.double()
    allowed = factor * ((centred * scale).abs() * (n / 2 + 8) * UNIT + off_centre * scale)
    return share(normed, exact, allowed + exact.abs() * 2 * UNIT + half_a_step(exact, normed.dtype))


KERNELS = {"layer_norm": KernelCheck(partial(norm, False)), "rms_norm": KernelCheck(partial(norm, True))}
