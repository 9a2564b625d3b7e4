"""A launch of a Triton kernel as data, and how products with few rows are divided among the warps of a GPU.

A file triton_*.py has for each of its kernels a function that makes the KernelCall of given tensors, and
`examples(target)`, which makes the same calls for tensors without memory: tools/kernel_table.py compiles them.

A program of a product keeps its rows in registers and lets tiles of outputs stream past; its threads share the inputs
of a tile, so that sums are split over them and no second pass adds anything up.

Imported only where a GPU is used, because it loads Triton.
"""

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
import triton
from torch.library import wrap_triton
from triton import JITFunction

MOST_ROWS, MOST_NUMBERS = 4, 64
"""Rows of a program, and how many of their activations a thread may have: ptxas spills registers beyond. Further rows
are other programs', which read the weights again."""
LOADS = 4
"""16-byte loads of weights that each thread has on the way at least."""
TILE_AIM = 4
"""Outputs of a tile, where the inputs are few enough: after each tile the threads wait for each other to add up."""
MOST_WARPS = 16
WARPS_A_MULTIPROCESSOR = 16
"""512 threads with LOADS loads are 32 KiB on the way. 4.8 TB/s (an H200's datasheet) for 0.8 us (assumed), over 132
multiprocessors, are 29 kB."""
INTERPRETED_WARPS, INTERPRETED_LOADS = 2, 64
"""Without a GPU: few programs and large tiles, because each operation of the interpreter costs the same."""
LEAST_INPUTS = 32
MATRIX_UNITS = (8, 0)
"""The first compute capability whose matrix units Triton uses (3.7)."""


@dataclass(frozen=True)
class LaunchTarget:
    """`warps` that run at once, among which work is divided, and the 16-byte `loads` that their threads make together.

    `dp4a`: whether int8 products may be that instruction. `matrix_units`: whether Triton multiplies 16-bit matrices by
    them; elsewhere operands are widened.
    """

    warps: int
    dp4a: bool
    loads: int = LOADS
    matrix_units: bool = True

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> "LaunchTarget":
        """For a CUDA device, or for the CPU with Triton's interpreter."""
        if device.type != "cuda":
            return LaunchTarget(INTERPRETED_WARPS, dp4a=False, loads=INTERPRETED_LOADS, matrix_units=False)
        count: int = torch.cuda.get_device_properties(device).multi_processor_count
        return LaunchTarget.of_card(count, torch.cuda.get_device_capability(device))

    @staticmethod
    def of_card(multiprocessors: int, capability: tuple[int, int]) -> "LaunchTarget":
        """For a GPU by its size and its compute capability."""
        warps = multiprocessors * WARPS_A_MULTIPROCESSOR
        return LaunchTarget(warps, dp4a=capability >= (6, 1), matrix_units=capability >= MATRIX_UNITS)


@dataclass(frozen=True)
class Launch:
    """`tile` outputs at a time of each of the streams of weights that a program reads, by `warps` warps."""

    tile: int
    warps: int
    programs: int
    rows: int
    row_programs: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.programs, self.row_programs


def padded(inputs: int) -> int:
    """The power of two that a tile has for so many inputs."""
    return int(max(LEAST_INPUTS, triton.next_power_of_2(inputs)))


def divided(
    inputs: int, output_bytes: int, outputs: int, rows: int, target: LaunchTarget, streams: int = 1
) -> Launch:
    """How a product is divided, so that each thread has the target's loads on the way.

    `inputs` and `output_bytes`, the bytes of an output's weights, are padded; `outputs` are those of one stream.
    """
    warp_bytes = 32 * 16 * target.loads
    warps = min(MOST_WARPS, max(1, TILE_AIM * output_bytes // warp_bytes))
    tile = max(1, warps * warp_bytes // output_bytes // streams)
    row_numbers = inputs // (32 * warps)
    together = min(MOST_ROWS, triton.next_power_of_2(rows), max(1, MOST_NUMBERS // max(1, row_numbers)))
    programs = min(triton.cdiv(outputs, tile), max(1, target.warps // warps))
    return Launch(tile, warps, programs, together, triton.cdiv(rows, together))


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
