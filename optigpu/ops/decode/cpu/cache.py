"""The memory of the CPU decoder's keys and values, in the layout of interface.h."""

import torch

from optigpu.ops.decode.cpu.arena import ask_for_huge_pages
from optigpu.ops.decode.program import CacheKind, Program, RotaryTable
from optigpu.ops.layouts import kv_bytes
from optigpu.vocabulary import UnsupportedError

KEY_BLOCK = 16
"""Tokens whose keys are stored together: a page is a multiple of it."""


class CpuCache:
    """Room for at least `capacity` tokens of each sequence, and the angles of their positions.

    Each sequence has one page of all its tokens, or takes pages of `page` tokens as it grows and gives them back. A
    head's pages follow each other in memory: read in another order, they take twice as long. Raises UnsupportedError
    when there is not enough memory, or for pages that are no multiple of KEY_BLOCK tokens.
    """

    def __init__(
        self, program: Program, kind: CacheKind, sequences: int, capacity: int, page: int | None = None
    ) -> None:
        if page is not None and (page < 1 or page % KEY_BLOCK):
            raise UnsupportedError(
                f"The CPU decoder keeps keys in blocks of {KEY_BLOCK} tokens, and pages of {page} are no multiple of "
                f"that; ask for pages of {max(1, -(-page // KEY_BLOCK)) * KEY_BLOCK} tokens."
            )
        self.kind = kind
        self.sequences = sequences
        self.is_paged = page is not None
        self.page = page or -(-capacity // KEY_BLOCK) * KEY_BLOCK
        most = -(-capacity // self.page)
        self.stored = most * self.page
        self.pages = most * sequences
        self._free = list(range(self.pages - 1, -1, -1)) if self.is_paged else []
        self._taken: list[list[int]] = [[] for _ in range(sequences)]
        self.table = torch.full((sequences, most), -1)
        if not self.is_paged:
            self.table[:, 0] = torch.arange(sequences)
        heads = len(program.blocks) * self.pages * program.kv_heads
        keys, values = kv_bytes(kind, program.head_size)
        scales = 0 if kind == "bf16" else heads
        try:
            self.keys = torch.empty(heads, self.page * keys, dtype=torch.uint8)
            self.values = torch.empty(heads, self.page * values, dtype=torch.uint8)
            self.key_scales = torch.empty(scales, self.page)
            self.value_scales = torch.empty(scales, self.page)
            self.angles = angles_of(program, self.stored)
        except RuntimeError as error:
            needed = heads * self.page * (keys + values)
            raise UnsupportedError(
                f"There is not enough memory for a cache of {capacity} tokens of {sequences} sequences "
                f"({needed / 2**30:.1f} GiB): use a shorter text or fewer sequences."
            ) from error
        for tensor in (self.keys, self.values, self.key_scales, self.value_scales):
            ask_for_huge_pages(tensor)

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys, values and their scales."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for tensor in tensors)

    def grow(self, sequence: int, tokens: int) -> None:
        """Takes the pages that a sequence lacks for so many tokens, which are not more than the capacity."""
        taken = self._taken[sequence]
        while len(taken) * self.page < tokens:
            self.table[sequence, len(taken)] = self._free[-1]
            taken.append(self._free.pop())

    def release(self, sequence: int) -> None:
        """Gives a sequence's pages back; the next to be taken are those that were given back last."""
        self._free += reversed(self._taken[sequence])
        self._taken[sequence].clear()
        self.table[sequence] = -1


def angles_of(program: Program, length: int) -> RotaryTable:
    """The cosines and the sines of all tables, float32 [tables, length, rotary_size / 2] each."""
    tables = [rotary(length) for rotary in program.rotaries]
    if not tables:
        return (torch.empty(0, length, 0), torch.empty(0, length, 0))
    cosines, sines = (torch.stack(parts) for parts in zip(*tables, strict=True))
    return cosines, sines
