"""The CUDA decoder's keys and values of one block. Loads no Triton."""

from dataclasses import dataclass

import torch

from optigpu.ops.decode.program import CacheKind


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

    @staticmethod
    def empty(
        kv: CacheKind, sequences: int, kv_heads: int, capacity: int, head_size: int, device: torch.device
    ) -> "LayerCache":
        """Room for so many tokens of each sequence."""
        shape, eight = (sequences, kv_heads, capacity), kv == "int8"
        dtype = torch.int8 if eight else torch.bfloat16
        return LayerCache(
            keys=torch.empty(*shape, head_size, dtype=dtype, device=device),
            values=torch.empty(*shape, head_size, dtype=dtype, device=device),
            key_steps=torch.empty(shape, device=device) if eight else None,
            value_steps=torch.empty(shape, device=device) if eight else None,
            fresh=torch.empty(sequences, 2 * kv_heads, head_size, device=device),
        )
