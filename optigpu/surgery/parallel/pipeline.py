"""Pipeline parallelism: each rank has some of the blocks, and passes the hidden states on.

Source: Huang et al., GPipe, 2018, arXiv:1811.06965; here without micro-batches, so that one rank computes at a time.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from optigpu.surgery.parallel.rank import receive, send
from optigpu.surgery.parallel.ranks import Divisible, Ranks, divisible
from optigpu.vocabulary import UnsupportedError

TECHNIQUE = "pipeline_parallel"


class OtherBlocks(torch.nn.Module):
    """The blocks of all other ranks, in the place of one block."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self._ways = ways

    def forward(self, states: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        """states: [rows, length, hidden]."""
        send(states, 1)
        return receive(torch.empty_like(states), self._ways - 1)


class _NoPositions(torch.nn.Module):
    """In the place of an embedding of positions, which rank 0 has added already."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden, self._dtype = hidden, dtype

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions: [rows, length]; returns zeros [rows, length, hidden]."""
        return torch.zeros(*positions.shape, self._hidden, dtype=self._dtype)


def divide(model: PreTrainedModel, ways: int) -> Ranks:
    """Leaves the first blocks, and starts the other ranks with theirs. Raises UnsupportedError for fewer blocks than
    ranks."""
    whole = divisible(model, TECHNIQUE)
    blocks = whole.blocks
    if len(blocks) < ways:
        raise UnsupportedError(
            f"{TECHNIQUE} needs a block for each of {ways} processes; this model has {len(blocks)}. Choose fewer ways."
        )
    each, more = divmod(len(blocks), ways)  # the first ranks have one more
    ends = [rank * each + min(rank, more) for rank in range(ways + 1)]
    stages = [blocks[first:last] for first, last in pairwise(ends)]
    parts = TemporaryDirectory(prefix="optigpu-ranks-")
    _save_others(whole, stages, Path(parts.name))
    setattr(whole.core, whole.decoder.blocks, torch.nn.ModuleList([*stages[0], OtherBlocks(ways)]))
    return Ranks("pipeline", parts, ways, whole.core)


def _save_others(whole: Divisible, stages: Sequence[Sequence[torch.nn.Module]], folder: Path) -> None:
    """Writes each other rank's part: the decoder with its blocks alone, then puts back what the model had."""
    core, decoder = whole.core, whole.decoder
    changed = {
        name: getattr(core, name) for name in (decoder.embedding, decoder.positions, decoder.final) if name
    }
    setattr(core, decoder.embedding, torch.nn.Identity())
    setattr(core, decoder.final, torch.nn.Identity())
    if decoder.positions:
        setattr(core, decoder.positions, _NoPositions(core.config.hidden_size, core.dtype))
    for rank, stage in enumerate(stages[1:], 1):
        for index, block in enumerate(stage):  # of the rank's own cache
            block.get_submodule(whole.attention.path).__dict__["layer_idx"] = index
        setattr(core, decoder.blocks, torch.nn.ModuleList(stage))
        torch.save(core, folder / f"{rank}.pt")
    for name, module in changed.items():
        setattr(core, name, module)
