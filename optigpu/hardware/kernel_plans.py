"""Plans of matrix products on an NVIDIA GPU: tiles, stages and warps, computed from the catalog and not measured.

A plan's seconds are a prediction. How many blocks a multiprocessor runs at once follows cuda_occupancy.h and the CUDA
C++ Programming Guide, "Multiprocessor level".
"""

from collections.abc import Iterator
from itertools import product
from typing import Literal

from optigpu.documents.peaks import Bound
from optigpu.hardware.catalog import Capability, Card, allocations
from optigpu.vocabulary import Frozen, SpecError

WARP = 32
"""Threads of a warp."""
Limit = Literal["threads", "blocks", "registers", "shared memory"]


class Occupancy(Frozen):
    """`blocks` and `warps` that a multiprocessor runs at once, their `share` of its warps, and what limits them."""

    blocks: int
    warps: int
    share: float
    limited_by: tuple[Limit, ...]


def occupancy(capability: Capability, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """For blocks of `threads` threads with `registers` registers each and `shared_bytes` of shared memory together.

    No blocks, limited by nothing, for what `refusal` gives a reason.
    """
    if refusal(capability, threads, registers, shared_bytes):
        return Occupancy(blocks=0, warps=0, share=0.0, limited_by=())
    allocation = allocations()[capability.compute_capability]
    warps = -(-threads // WARP)
    unit, partitions = allocation.register_unit, allocation.partitions
    of_a_warp = max(unit, -(-registers * WARP // unit) * unit)  # from one partition
    needed = shared_bytes + capability.reserved_bytes_per_block
    needed = -(-needed // allocation.shared_unit_bytes) * allocation.shared_unit_bytes
    limits: dict[Limit, int] = {
        "threads": capability.threads // WARP // warps,
        "blocks": capability.blocks,
        "registers": capability.registers // partitions // of_a_warp * partitions // warps,
        "shared memory": capability.shared_bytes // needed if needed else capability.blocks,
    }
    blocks = min(limits.values())
    return Occupancy(
        blocks=blocks,
        warps=blocks * warps,
        share=blocks * warps / (capability.threads // WARP),
        limited_by=tuple(name for name, most in limits.items() if most == blocks),
    )


def refusal(capability: Capability, threads: int, registers: int, shared_bytes: int) -> str | None:
    """Why no multiprocessor of that capability can run such a block, in one sentence, or None."""
    if min(threads, registers) < 1 or shared_bytes < 0:
        return "A block needs at least one thread, and each thread at least one register."
    for value, most, what in (
        (threads, capability.threads_per_block, "threads of a block"),
        (registers, capability.registers_per_thread, "registers of a thread"),
        (threads * registers, capability.registers, "registers of a block"),
        (shared_bytes, capability.shared_bytes_per_block, "bytes of shared memory of a block"),
    ):
        if value > most:
            return f"{value} {what} are too many: {capability.name} allows {most}."
    return None


LATENCY_S = 0.8e-6
"""Assumed: from asking for bytes of memory to having them. Bytes under way are the bandwidth times this (Little)."""
OTHER_REGISTERS = 40
"""Assumed: registers of a thread for addresses, loop counters and scales, besides its accumulators and fragments."""
REGISTER_STEP = 8
"""Compilers give registers to threads in multiples of this."""

SHARED_BYTES_PER_CLOCK = 128
"""Of a multiprocessor: 32 banks of 4 bytes (CUDA C++ Programming Guide, "Shared Memory")."""
L2_BYTES_PER_CLOCK = 64
"""What a multiprocessor gets from the L2 cache at most (Jia et al., Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking, 2018, arXiv:1804.06826)."""

TILES_M, TILES_N, TILES_K = (16, 32, 64, 128), (32, 64, 128, 256), (32, 64, 128)
WARPS, STAGES, SPLITS = (4, 8), (2, 3, 4, 5), (1, 2, 4, 8, 16)
STAGES_WITHOUT_ASYNC = 2
"""Without asynchronous copies a stage waits in registers, and two are all that there is room for."""
HALF = 2
"""Bytes of a float16."""
ACCUMULATOR = 4
"""Bytes of a float32, in which products are summed."""


class Problem(Frozen):
    """y [rows, outputs] = x [rows, inputs] @ weight.T, x and y in float16.

    weight_bits: 16, or 4 with a float16 scale for each `group_size` inputs of an output.
    """

    rows: int
    inputs: int
    outputs: int
    weight_bits: Literal[4, 16] = 4
    group_size: int = 128

    @property
    def weight_bytes(self) -> int:
        scales = HALF * self.outputs * -(-self.inputs // self.group_size) if self.weight_bits == 4 else 0
        return self.outputs * self.inputs * self.weight_bits // 8 + scales

    @property
    def io_bytes(self) -> int:
        return HALF * self.rows * (self.inputs + self.outputs)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs


class Tiling(Frozen):
    """A block's tile [m, n, k], its warps, how many k-steps are loaded ahead, and the parts that inputs are split
    into."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    split_k: int


class KernelPlan(Frozen):
    """How a product is divided on a card. `registers` of a thread are an estimate, `seconds` a prediction.

    `blocks` of the whole product run in `waves`; `bound` is memory, or compute for all that is on the chip: tensor
    cores, shared memory and the L2 cache.
    """

    card: str
    problem: Problem
    tiling: Tiling
    mma: tuple[int, int, int]
    threads: int
    registers: int
    shared_bytes: int
    occupancy: Occupancy
    blocks: int
    waves: int
    bound: Bound
    seconds: float
    basis: Literal["predicted"] = "predicted"


def planned(card: Card, problem: Problem) -> KernelPlan:
    """The plan with the shortest predicted time; of equal ones that which loads the least.

    Raises SpecError for sizes that are not positive and a group size that does not divide the inputs.
    """
    if min(problem.rows, problem.inputs, problem.outputs, problem.group_size) < 1:
        raise SpecError(
            "A product needs at least one row, one input, one output and groups of at least one input."
        )
    if problem.weight_bits == 4 and problem.inputs % problem.group_size:
        raise SpecError(
            f"group_size {problem.group_size} does not divide {problem.inputs} inputs; choose a divisor."
        )
    bytes_per_s = _bytes_per_s(card)
    found = (_estimate(card, bytes_per_s, problem, tiling) for tiling in _tilings(card, problem))
    plan, _ = min(
        (each for each in found if each), key=lambda each: (each[0].seconds, each[1], each[0].shared_bytes)
    )
    return plan


def streamed_s(card: Card, size: int) -> float:
    """The seconds in which a card's memory moves so many bytes."""
    return size / _bytes_per_s(card)


def _bytes_per_s(card: Card) -> float:
    bandwidth = card.device.memory_bandwidth_bytes_per_s
    if bandwidth is None:
        raise SpecError(f"The catalog has no memory bandwidth of {card.device.name}; choose another GPU.")
    return bandwidth


def _tilings(card: Card, problem: Problem) -> Iterator[Tiling]:
    """All that the shape allows: no tile is taller than the rows need, and each part of the inputs has a step."""
    m, n, k = card.allocation.mma["fp16"]
    rows = -(-problem.rows // m) * m
    stages = STAGES if card.allocation.async_copy else (STAGES_WITHOUT_ASYNC,)
    for tile_m, tile_n, tile_k, warps, ahead, split in product(
        TILES_M, TILES_N, TILES_K, WARPS, stages, SPLITS
    ):
        fits = tile_m <= max(rows, TILES_M[0]) and tile_k % k == 0
        if fits and tile_m * tile_n >= warps * m * n and problem.inputs >= split * tile_k * ahead:
            yield Tiling(m=tile_m, n=tile_n, k=tile_k, warps=warps, stages=ahead, split_k=split)


def _estimate(
    card: Card, bytes_per_s: float, problem: Problem, tiling: Tiling
) -> tuple[KernelPlan, int] | None:
    """The plan and the bytes that all blocks bring into shared memory; None for a block that does not fit."""
    x_bytes, weight_bytes = HALF * tiling.m * tiling.k, tiling.n * tiling.k * problem.weight_bits // 8
    scales = HALF * tiling.n * -(-tiling.k // problem.group_size) if problem.weight_bits == 4 else 0
    stage_bytes, registers = x_bytes + weight_bytes + scales, _registers(card, tiling)
    shared_bytes, threads = tiling.stages * stage_bytes, WARP * tiling.warps
    room = occupancy(card.capability, threads, registers, shared_bytes)
    if not room.blocks:
        return None
    tiles = -(-problem.rows // tiling.m) * -(-problem.outputs // tiling.n)
    blocks, at_once = tiles * tiling.split_k, card.multiprocessors * room.blocks
    busy = blocks / (-(-blocks // card.multiprocessors) * card.multiprocessors)
    steps = tiles * -(-problem.inputs // tiling.k)
    under_way = min(blocks, at_once) * (tiling.stages - 1) * stage_bytes
    sums = 2 * ACCUMULATOR * problem.rows * problem.outputs * tiling.split_k if tiling.split_k > 1 else 0
    moved = problem.weight_bytes + problem.io_bytes + sums
    memory_s = moved / min(bytes_per_s, under_way / LATENCY_S)
    clocks = card.device.blocks[0].clock_hz * card.multiprocessors * busy
    flop_per_s = card.device.peak_flop_per_s["fp16"] * busy
    multiply_s = 2 * steps * tiling.m * tiling.n * tiling.k / flop_per_s
    # Each warp reads the whole tile of x, and its part of the weights.
    read_s = steps * (tiling.warps * x_bytes + weight_bytes) / (SHARED_BYTES_PER_CLOCK * clocks)
    load_s = steps * stage_bytes / (L2_BYTES_PER_CLOCK * clocks)
    on_chip_s = max(multiply_s, read_s, load_s)
    plan = KernelPlan(
        card=card.device.name,
        problem=problem,
        tiling=tiling,
        mma=card.allocation.mma["fp16"],
        threads=threads,
        registers=registers,
        shared_bytes=shared_bytes,
        occupancy=room,
        blocks=blocks,
        waves=-(-blocks // at_once),
        bound=Bound.COMPUTE if on_chip_s > memory_s else Bound.MEMORY,
        seconds=max(memory_s, on_chip_s) + LATENCY_S,
    )
    return plan, steps * stage_bytes


def _registers(card: Card, tiling: Tiling) -> int:
    """Of a thread: its accumulators, and the fragments of one instruction's depth twice, one of them being loaded."""
    _, n, k = card.allocation.mma["fp16"]
    accumulators = tiling.m * tiling.n // (WARP * tiling.warps)
    warp_n = max(n, tiling.n // tiling.warps)
    fragments = 2 * HALF * (tiling.m + warp_n) * k // (WARP * ACCUMULATOR)
    total = accumulators + fragments + OTHER_REGISTERS
    return -(-total // REGISTER_STEP) * REGISTER_STEP
