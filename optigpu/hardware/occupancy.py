"""How many blocks of a kernel a multiprocessor runs at once, by NVIDIA's rules of allocation.

Source: NVIDIA cuda_occupancy.h and the CUDA C++ Programming Guide, "Multiprocessor level".
"""

from typing import Literal

from optigpu.hardware.catalog import Allocation, Capability, allocations
from optigpu.vocabulary import Frozen

WARP = 32
"""Threads of a warp."""
Limit = Literal["threads", "blocks", "registers", "shared memory"]


class Occupancy(Frozen):
    """`blocks` and `warps` that a multiprocessor runs at once; `share` of the warps that it has room for, and what
    limits them."""

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
    limits: dict[Limit, int] = {
        "threads": capability.threads // WARP // warps,
        "blocks": capability.blocks,
        "registers": _by_registers(capability, allocation, registers) // warps,
        "shared memory": _by_shared_memory(capability, allocation, shared_bytes),
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


def _by_registers(capability: Capability, allocation: Allocation, registers: int) -> int:
    """Warps that have room: each takes its registers from one partition."""
    unit = allocation.register_unit
    of_a_warp = max(unit, -(-registers * WARP // unit) * unit)
    return capability.registers // allocation.partitions // of_a_warp * allocation.partitions


def _by_shared_memory(capability: Capability, allocation: Allocation, shared_bytes: int) -> int:
    """Blocks that have room, each with what the driver reserves."""
    unit = allocation.shared_unit_bytes
    needed = -(-(shared_bytes + capability.reserved_bytes_per_block) // unit) * unit
    return capability.shared_bytes // needed if needed else capability.blocks
