"""The decoder of a program, on the device where its weights are."""

from typing import TYPE_CHECKING, Any

import torch

from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.program import CacheKind, Program

if TYPE_CHECKING:
    from optigpu.ops.decode.cuda.decoder import CudaDecoder

    Decoder = CpuDecoder | CudaDecoder


def new_decoder(program: Program, kv: CacheKind) -> "Decoder":
    """A decoder on the device of the program's weights; on a CPU with as many threads as torch has."""
    if program.device.type != "cpu":
        from optigpu.ops.decode.cuda.decoder import CudaDecoder  # imports Triton

        return CudaDecoder(program, kv)
    return CpuDecoder(program, kv, threads=torch.get_num_threads(), cpus=one_cpu_of_each_core())


def placement_facts(decoder: "Decoder") -> dict[str, Any]:
    """On which memory nodes the weights lie; empty where there was no choice."""
    return decoder.placement.facts() if isinstance(decoder, CpuDecoder) and decoder.placement else {}
