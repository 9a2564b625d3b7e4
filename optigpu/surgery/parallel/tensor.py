"""Tensor parallelism: each rank has some of the heads and some of the MLP's inner features of every block.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053. Two sums over all ranks a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optigpu.surgery.parallel.ranks import Divisible, Ranks, divisible
from optigpu.surgery.places import Place, weight_of
from optigpu.vocabulary import UnsupportedError

TECHNIQUE = "tensor_parallel"


class Summed(torch.nn.Module):
    """A linear layer of some of the inputs; the products of all ranks are added up, then the bias once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: [..., this rank's inputs]; returns [..., outputs], the same on all ranks."""
        partial = torch.nn.functional.linear(inputs, self.weight)
        total = partial.float()
        dist.all_reduce(total)
        total = total.to(partial.dtype)
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True)
class _Cut:
    """How the layer at a place is divided: its outputs in `joined` equal parts (0: its inputs)."""

    place: Place
    joined: int

    def part(self, layer: torch.nn.Linear | Conv1D, rank: int, ways: int) -> torch.nn.Module:
        weight = weight_of(layer)  # [outputs, inputs]
        bias: torch.Tensor | None = layer.bias
        if not self.joined:
            return Summed(weight.chunk(ways, 1)[rank].contiguous(), None if bias is None else bias.detach())
        mine = torch.cat([each.chunk(ways)[rank] for each in weight.chunk(self.joined)])
        made = torch.nn.Linear(mine.shape[1], mine.shape[0], bias=bias is not None, device="meta")
        made.weight = torch.nn.Parameter(mine.contiguous(), requires_grad=False)
        if bias is not None:
            rows = torch.cat([each.chunk(ways)[rank] for each in bias.chunk(self.joined)])
            made.bias = torch.nn.Parameter(rows, requires_grad=False)
        return made.eval()


def divide(model: PreTrainedModel, ways: int) -> Ranks:
    """Leaves rank 0's part, and starts the other ranks. Raises UnsupportedError for heads or features that ways do
    not divide."""
    whole = divisible(model, TECHNIQUE)
    cuts = list(_cuts(whole))
    _check(model, cuts, ways)
    layers = [cut.place.layer for cut in cuts]
    parts = TemporaryDirectory(prefix="optigpu-ranks-")
    embedding = whole.core.get_input_embeddings()
    for block in whole.blocks:
        heads = block.get_submodule(whole.attention.path)
        for name in ("split_size", "num_heads"):  # of GPT-2; Llama's width follows from its layers
            if hasattr(heads, name):
                setattr(heads, name, getattr(heads, name) // ways)
    whole.core.set_input_embeddings(torch.nn.Identity())  # only rank 0 looks tokens up
    for rank in (*range(1, ways), 0):
        for cut, layer in zip(cuts, layers, strict=True):
            cut.place.put(cut.part(layer, rank, ways))
        if rank:
            torch.save(whole.core, Path(parts.name) / f"{rank}.pt")
    whole.core.set_input_embeddings(embedding)
    return Ranks("tensor", parts, ways, whole.core)


def _cuts(whole: Divisible) -> Iterator[_Cut]:
    attention, mlp = whole.attention, whole.mlp
    for block in whole.blocks:
        heads, inner = block.get_submodule(attention.path), block.get_submodule(mlp.path)
        joined = 3 if len(attention.qkv) == 1 else 1
        for name in attention.qkv:
            yield _Cut(Place(f"{attention.path}.{name}", heads, name), joined)
        yield _Cut(Place(f"{attention.path}.{attention.output}", heads, attention.output), 0)
        for name in (mlp.gate, mlp.up) if mlp.gate else (mlp.up,):
            yield _Cut(Place(f"{mlp.path}.{name}", inner, str(name)), 1)
        yield _Cut(Place(f"{mlp.path}.{mlp.down}", inner, mlp.down), 0)


def _check(model: PreTrainedModel, cuts: list[_Cut], ways: int) -> None:
    heads = model.config.num_attention_heads
    kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
    for title, count in (("attention heads", heads), ("key-value heads", kv_heads)):
        if count % ways:
            raise UnsupportedError(
                f"{TECHNIQUE} needs {title} that {ways} processes can share evenly; this model has {count}. Choose "
                "another number of ways."
            )
    for cut in cuts:
        if type(cut.place.layer) not in (torch.nn.Linear, Conv1D):
            raise UnsupportedError(
                f"{TECHNIQUE} divides plain linear layers, and {cut.place.path} is a {type(cut.place.layer).__name__}; "
                "leave out what replaces it."
            )
        outputs, inputs = weight_of(cut.place.layer).shape
        divided = outputs // cut.joined if cut.joined else inputs
        if divided % ways:
            raise UnsupportedError(
                f"{TECHNIQUE} cannot divide the {divided} features of {cut.place.path} among {ways} processes; choose "
                "another number of ways."
            )
