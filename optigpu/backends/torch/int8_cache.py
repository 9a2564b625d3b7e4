"""Keys and values as int8 with one scale for each token and head: the arithmetic behind `int8_kv_cache`.

A scale for each channel suits keys better below 8 bits (Liu et al., KIVI, 2024, arXiv:2402.02750), but needs groups of
tokens that are held back until they are full; with 8 bits one for each token loses little and can be stored at once.
"""

import torch

from optigpu.ops.layouts import KV_SCALE_BYTES

INT8_LARGEST = 127
"""Symmetric: -128 is not used."""


def quantize_tokens(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 numbers and their scales (absmax / 127, round to nearest).

    states: floating point [batch, heads, tokens, head_size]. Returns int8 of the same shape and float32
    [batch, heads, tokens, 1]; a state is about `q * scale`, wrong by at most half a scale. NaN and infinity stay
    visible: the scale of such a token is no number either.
    """
    wide = states.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / INT8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8), scale


def dequantize_tokens(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The states in `dtype`, [batch, heads, tokens, head_size]."""
    return (q * scale).to(dtype)


def int8_token_bytes(layers: int, kv_heads: int, head_size: int) -> int:
    """Bytes that one token of one sequence takes, its keys and values with their scales over all layers."""
    return 2 * layers * kv_heads * (head_size + KV_SCALE_BYTES)
