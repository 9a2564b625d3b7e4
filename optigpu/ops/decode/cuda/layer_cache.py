"""The CUDA decoder's keys and values of one block. Loads no Triton."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerCache:
    """The cache of one block, [sequences, kv_heads, capacity, head_size], bfloat16 or int8.

    steps: float32 [sequences, kv_heads, capacity] that int8 numbers count, None for bfloat16. fresh: float32
    [sequences, 2 * kv_heads, head_size], the new token's keys and values before an int8 cache has them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_steps: torch.Tensor | None
    value_steps: torch.Tensor | None
    fresh: torch.Tensor
