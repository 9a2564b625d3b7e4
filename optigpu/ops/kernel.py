"""A launch of a Triton kernel as data: what a launcher runs, and what is compiled ahead without a GPU.

A file triton_*.py has for each of its kernels a function that makes the KernelCall of given tensors, and
`examples(target)`, which makes the same calls for tensors without memory: tools/kernel_table.py compiles them.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch.library import wrap_triton
from triton import JITFunction

Argument = torch.Tensor | int | float
"""What a launch passes to a kernel."""


@dataclass(frozen=True)
class KernelCall:
    """`arguments` are in the order of the kernel's parameters; after them come its `constants`, by name."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Hashable]
    warps: int = 4

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps}

    def run_traced(self) -> None:
        """The same inside an operator that `triton_op` registers, so that torch.compile sees the launch."""
        wrap_triton(self.kernel)[self.grid](*self.arguments, **self.constants, **self.options)


@dataclass(frozen=True)
class Example:
    """A call that is compiled ahead, by a name of its own among the examples of its kernel.

    `spilled_bytes`: the most bytes of registers that a thread may store to memory and load again.
    """

    name: str
    call: KernelCall
    spilled_bytes: int = 0


def without_memory(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
