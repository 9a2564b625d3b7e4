"""One piece of memory for all weights of a decoder, in huge pages where the kernel has them.

A step reads every weight once, and looks up each page once: of pages of 2 MiB there are 512 times fewer than of 4 KiB.
"""

import ctypes
import math
import mmap

import torch

from optigpu.ops.layouts import DECODE_ALIGNMENT
from optigpu.vocabulary import UnsupportedError

HUGE_PAGE_BYTES = 2**21
"""Bytes of a huge page on x86 and on most ARM machines; where they are larger, this is an alignment like any other."""
ALIGNMENT = DECODE_ALIGNMENT


def aligned(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes of an arena."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Memory from which tensors are allocated one after the other. They share one storage of `size` bytes.

    `huge`: whether the kernel was asked for huge pages; it does not report whether it had any left. Raises
    UnsupportedError when there is no room for so many bytes.
    """

    def __init__(self, size: int) -> None:
        try:
            # Private: anonymous memory that is shared is not given huge pages by default.
            area = mmap.mmap(-1, _whole(size) + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UnsupportedError(
                f"There is not enough memory for {size} bytes of weights in one piece ({error.strerror}): use fewer "
                "bits or a smaller model."
            ) from error
        offset = -torch.frombuffer(area, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
        whole = torch.frombuffer(area, dtype=torch.uint8, count=max(1, _whole(size)), offset=offset)
        self.huge = size > 0 and ask_for_huge_pages(whole)
        self._bytes = torch.frombuffer(area, dtype=torch.uint8, count=max(1, size), offset=offset)
        self._left = size

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of zeros, at a multiple of ALIGNMENT. Raises ValueError when less is left than it takes."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._left:
            raise ValueError(f"The arena has {self._left} bytes left, and {shape} takes {size}.")
        begin = self._bytes.numel() - self._left
        self._left = max(0, self._left - aligned(size))
        return self._bytes[begin : begin + size].view(dtype).view(shape)


def ask_for_huge_pages(memory: torch.Tensor) -> bool:
    """Whether the kernel was asked: whole huge pages within the memory become such. Not every system can.

    Before anything is written: a page keeps the size that it was first touched with.
    """
    advice, start = getattr(mmap, "MADV_HUGEPAGE", None), memory.data_ptr()
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    left = start + memory.nbytes - begin
    if advice is None or left <= 0:
        return False
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(left), advice) == 0)


def _whole(size: int) -> int:
    """`size` rounded up to whole huge pages, so that the last weights are in one too."""
    return -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
