"""The terms of the model of `thread_costs`, measured on this machine: bandwidth, the rate of products, meetings."""

import ctypes
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.native_program import shaped_program
from optigpu.documents.shapes import ModelFacts
from optigpu.ops.build import load_library
from optigpu.ops.decode import cpu
from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.rates.rates import SLICE_BYTES, WAYS, RateLoops
from optigpu.roofline.work import matmul_flops

READ_BYTES = 2**30
"""Of a sample of the bandwidth, at least."""
MEETS = 10_000
STEPS = 32
"""Of a sample of the rate of products."""
REPEATS = 32
SMALL = ModelFacts(
    family="llama",
    hidden_size=256,
    layers=REPEATS,
    heads=2,
    kv_heads=1,
    vocabulary=256,
    context=64,
    tied_head=True,
    head_size=64,
    inner_size=1024,
    gated_mlp=True,
    embedding_size=256,
)
"""Most of its 0.9 million weights of a block are the MLP's: half a megabyte, which stays in a core's second cache."""
_MEETS = Path(__file__).with_name("team_meets.cpp")
_TEAM = Path(cpu.__file__).with_name("team.h")


class Memory:
    """Reads an array as large as what a step reads, in huge pages as weights are, with the loops of `ops/rates`."""

    def __init__(self, step_bytes: float) -> None:
        slices = max(1, int(step_bytes) // SLICE_BYTES)
        size = slices * SLICE_BYTES
        self._array = Arena(size).take((size // 4,), torch.float32).fill_(1)

    def bytes_per_s(self, threads: int) -> float:
        """The better of both ways to read."""
        passes = math.ceil(READ_BYTES / self._array.nbytes)
        loops = RateLoops(threads)
        return max(passes * self._array.nbytes / loops.read_s(self._array, passes, way) for way in WAYS)


class Products:
    """The operator on one thread, with the weights of one block again and again, which stay in a cache."""

    def __init__(self) -> None:
        program = shaped_program(replace(SMALL, layers=1), SMALL.longest)
        self._decoder = CpuDecoder(replace(program, blocks=program.blocks * REPEATS))

    def flops_per_s(self) -> float:
        """Operations of the matrices by the time of whole steps, whose norms and attention take a part of it."""
        self._decoder.begin(1, SMALL.longest)
        last = self._decoder.extend(torch.ones(1, 1, dtype=torch.int64)).argmax(1, keepdim=True)
        last = self._decoder.decode(last, 2)[:, -1:]
        began = time.perf_counter()
        self._decoder.decode(last, STEPS)
        return STEPS * matmul_flops(SMALL, 1, 1) / (time.perf_counter() - began)


def meet_s(cpus: Sequence[int]) -> float:
    """Seconds of a meeting of the decoder's own team, a thread on each of these CPUs."""
    numbers = (ctypes.c_int64 * len(cpus))(*cpus)
    return float(_meets()(len(cpus), numbers, MEETS)) / MEETS


@cache
def _meets() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = load_library((_MEETS, _TEAM)).optigpu_team_meets
    function.argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    function.restype = ctypes.c_double
    return function
