"""What every example takes on every GPU of the catalog, and whether the GPU has that much."""

from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any

import torch

from optigpu.hardware.catalog import Capability, capabilities
from optigpu.hardware.kernel_plans import occupancy
from optigpu.ops.launch import Example
from tools.kernels.compiling import Compiled, compiled, digest_of
from tools.kernels.sources import examples_of, files, name_of

BF16_CAPABILITY = (8, 0)
"""The first GPUs with bfloat16."""


@dataclass(frozen=True)
class Row:
    """An example on a capability. Figures are null where it was not compiled, and `reason` says why.

    `blocks`: blocks that a multiprocessor runs at once; `bytes_in_flight`: what their threads ask for at once.
    `digest` is of all that the figures depend on but the limits.
    """

    file: str
    kernel: str
    example: str
    capability: str
    reason: str | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    blocks: int | None = None
    bytes_in_flight: int | None = None
    faults: tuple[str, ...] = ()
    digest: str | None = None


Known = Mapping[str, Row]
"""Rows that were compiled before, by their digests."""


def rows(processes: int, known: Known = MappingProxyType({})) -> list[Row]:
    """All examples on all capabilities, by as many processes; those that are known are not compiled again."""
    tasks = [(file, number, dict(known)) for file in files() for number in range(len(capabilities()))]
    if processes == 1:
        found = [rows_of(task) for task in tasks]
    else:
        # A fork of a process that has loaded torch may wait forever for a lock.
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            found = list(pool.map(rows_of, tasks))
    return [row for part in found for row in part]


def known_rows(published: Sequence[Mapping[str, Any]], again: Container[str] = ()) -> dict[str, Row]:
    """The rows of a written table that need no compiling, without those of the capabilities `again`."""
    made = (Row(**{**row, "faults": tuple(row["faults"])}) for row in published)
    return {row.digest: row for row in made if row.digest and row.capability not in again}


def rows_of(task: tuple[str, int, Known]) -> list[Row]:
    """The examples of a file on one of the catalog's capabilities, by its number."""
    file, number, known = task
    capability = capabilities()[number]
    return [row_of(file, example, capability, known) for example in examples_of(file, capability)]


def row_of(file: str, example: Example, capability: Capability, known: Known = MappingProxyType({})) -> Row:
    """One example on one capability. One that does not compile is a fault, not an error."""
    named = (f"optigpu/ops/{file.replace('.', '/')}.py", name_of(example), example.name, capability.name)
    reason = lacking(example, capability)
    if reason is not None:
        return Row(*named, reason=reason)
    digest = digest_of(example.call, capability)
    try:
        done = _figures(known[digest]) if digest in known else compiled(example.call, capability)
    except Exception as error:  # of Triton, LLVM or ptxas, which have no common base
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Row(*named, reason="it does not compile", faults=(f"it does not compile: {words}",))
    blocks = blocks_at_once(done, capability)
    return Row(
        *named,
        registers=done.registers,
        spilled_bytes=done.spilled_bytes,
        shared_bytes=done.shared_bytes,
        threads=done.threads,
        blocks=blocks,
        bytes_in_flight=blocks * done.threads * done.loaded_bytes,
        faults=tuple(faults(done, example.spilled_bytes, capability)),
        digest=digest,
    )


def _figures(row: Row) -> Compiled:
    """What was compiled for a row, without its code; limits are held against it anew."""
    registers, spilled = row.registers or 0, row.spilled_bytes or 0
    shared, threads = row.shared_bytes or 0, row.threads or 1
    loaded = (row.bytes_in_flight or 0) // ((row.blocks or 1) * threads)
    return Compiled(registers, spilled, shared, threads, loaded, ptx="")


def lacking(example: Example, capability: Capability) -> str | None:
    """Why an example is not compiled for a capability: its activations are of a type that such GPUs do not have."""
    first = example.call.arguments[0]
    if (
        isinstance(first, torch.Tensor)
        and first.dtype == torch.bfloat16
        and capability.parts < BF16_CAPABILITY
    ):
        return f"{capability.name} has no bfloat16"
    return None


def blocks_at_once(done: Compiled, capability: Capability) -> int:
    """Blocks that a multiprocessor has room for: by threads, registers, shared memory, and a limit of its own."""
    return occupancy(capability, done.threads, done.registers, done.shared_bytes).blocks


def faults(done: Compiled, most_spilled_bytes: int, capability: Capability) -> list[str]:
    """What is beyond a limit, in a sentence each."""
    checks: Sequence[tuple[int, int, str]] = (
        (done.spilled_bytes, most_spilled_bytes, "bytes of registers spilled by a thread"),
        (done.registers, capability.registers_per_thread, "registers of a thread"),
        (done.threads * done.registers, capability.registers, "registers of a block"),
        (done.threads, capability.threads_per_block, "threads of a block"),
        (done.shared_bytes, capability.shared_bytes_per_block, "bytes of shared memory of a block"),
    )
    return [f"{value} {what}, and {most} are allowed" for value, most, what in checks if value > most]
