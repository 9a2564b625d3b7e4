"""The memory of the CPU decoder's keys and values, in the layout of interface.h."""

import torch

from optigpu.ops.decode.program import CacheKind, Program
from optigpu.vocabulary import UnsupportedError

KEY_BLOCK = 16
"""Tokens whose keys are stored together: the capacity of a cache is a multiple of it."""
VALUE_STEP = 16
"""A token's values are padded to a multiple of this."""


class CpuCache:
    """Room for `stored` tokens, at least `capacity`, of each sequence, and the angles of their positions.

    Raises UnsupportedError when there is not enough memory.
    """

    def __init__(self, program: Program, kind: CacheKind, sequences: int, capacity: int) -> None:
        self.kind = kind
        self.sequences = sequences
        self.stored = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        heads = len(program.blocks) * sequences * program.kv_heads
        padded = -(-program.head_size // VALUE_STEP) * VALUE_STEP
        dtype = torch.bfloat16 if kind == "bf16" else torch.int8
        scales = heads if kind == "int8" else 0
        try:
            self.keys = torch.empty(heads, self.stored * program.head_size, dtype=dtype)
            self.values = torch.empty(heads, self.stored * padded, dtype=dtype)
            self.key_scales = torch.empty(scales, self.stored)
            self.value_scales = torch.empty(scales, self.stored)
            self.angles = program.rotary(self.stored) if program.rotary else None
        except RuntimeError as error:
            needed = heads * self.stored * (program.head_size + padded) * dtype.itemsize
            raise UnsupportedError(
                f"There is not enough memory for a cache of {capacity} tokens of {sequences} sequences "
                f"({needed / 2**30:.1f} GiB): use a shorter text or fewer sequences."
            ) from error

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys, values and their scales."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
