"""What the kernels of a decode step read and write besides weights, for a number of sequences and a cache size.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from optigpu.ops.decode.cuda.layer_cache import LayerCache
from optigpu.ops.decode.cuda.packing import places_of_finer
from optigpu.ops.decode.cuda.state import State
from optigpu.ops.decode.cuda.triton_attention import PartialSoftmax
from optigpu.ops.decode.program import CacheKind, Program, RotaryTable
from optigpu.ops.launch import LaunchTarget


@dataclass(frozen=True)
class StepMemory:
    """float32 where nothing else is said, [sequences, ...] each.

    x: the residual, [width]; query: [heads, head_size]; attended: the same, flat; inner: [inner]; logits: [vocabulary];
    finer: the outputs of the head's finer rows, whose places are `finer_places`, int64 [vocabulary].
    """

    state: State
    layers: tuple[LayerCache, ...]
    rotary: "RotaryTable | None"
    x: torch.Tensor
    query: torch.Tensor
    parts: PartialSoftmax
    attended: torch.Tensor
    inner: torch.Tensor
    logits: torch.Tensor
    finer: torch.Tensor
    finer_places: torch.Tensor

    @staticmethod
    def of(
        program: Program, kv: CacheKind, sequences: int, capacity: int, target: LaunchTarget
    ) -> "StepMemory":
        """On the program's device."""
        device = program.device
        empty = _allocator(device, sequences)
        state = State(
            empty(dtype=torch.int64).zero_(),
            empty(dtype=torch.int32).zero_(),
            empty(dtype=torch.int32).zero_(),
            empty(capacity, dtype=torch.int64),
        )
        layers = tuple(
            LayerCache.empty(kv, sequences, program.kv_heads, capacity, program.head_size, device)
            for _ in program.blocks
        )
        query = empty(program.heads, program.head_size)
        return StepMemory(
            state=state,
            layers=layers,
            rotary=_rotary(program, capacity),
            x=empty(program.width),
            query=query,
            parts=PartialSoftmax.of(query, layers[0], target),
            attended=empty(program.heads * program.head_size),
            inner=empty(program.inner),
            logits=empty(program.vocabulary),
            finer=empty(program.head.finer.matrix.outputs if program.head.finer else 0),
            finer_places=places_of_finer(program.embedding),
        )


def _rotary(program: Program, capacity: int) -> "RotaryTable | None":
    if program.rotary is None:
        return None
    cosine, sine = (table.to(program.device).contiguous() for table in program.rotary(capacity))
    return cosine, sine


def _allocator(device: torch.device, sequences: int) -> Callable[..., torch.Tensor]:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sequences, *shape, dtype=dtype, device=device)

    return empty
