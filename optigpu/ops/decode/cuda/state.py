"""What the CUDA decoder keeps of its sequences: where they are, and each block's keys and values. Loads no Triton."""

from dataclasses import dataclass

import torch

from optigpu.ops.decode.program import CacheKind


@dataclass(frozen=True)
class State:
    """The state of the sequences, [sequences] each except the last.

    tokens: int64, what is appended next; position: int32, where; not_finite: int32, 1 once a logit was not finite;
    chosen: int64 [sequences, capacity], the token that was chosen after each position.
    """

    tokens: torch.Tensor
    position: torch.Tensor
    not_finite: torch.Tensor
    chosen: torch.Tensor

    @staticmethod
    def empty(sequences: int, capacity: int, device: torch.device) -> "State":
        """Of sequences without tokens."""
        position, not_finite = (torch.zeros(sequences, dtype=torch.int32, device=device) for _ in range(2))
        tokens = torch.zeros(sequences, dtype=torch.int64, device=device)
        chosen = torch.empty(sequences, capacity, dtype=torch.int64, device=device)
        return State(tokens, position, not_finite, chosen)


@dataclass(frozen=True)
class LayerCache:
    """The cache of one block, [sequences, kv_heads, capacity, head_size], bfloat16 or int8.

    steps: float32 [sequences, kv_heads, capacity] that int8 numbers count, None for bfloat16.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_steps: torch.Tensor | None
    value_steps: torch.Tensor | None

    @staticmethod
    def empty(
        kv: CacheKind, sequences: int, kv_heads: int, capacity: int, head_size: int, device: torch.device
    ) -> "LayerCache":
        """Room for so many tokens of each sequence."""
        shape, eight = (sequences, kv_heads, capacity), kv == "int8"
        dtype = torch.int8 if eight else torch.bfloat16
        keys, values = (torch.empty(*shape, head_size, dtype=dtype, device=device) for _ in range(2))
        key_steps, value_steps = (torch.empty(shape, device=device) if eight else None for _ in range(2))
        return LayerCache(keys, values, key_steps, value_steps)
