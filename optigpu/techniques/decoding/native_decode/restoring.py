"""The tensors of packed layers, and layers of such tensors again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.program import FinerRows, Matrix, WeightKind
from optigpu.surgery.places import Place, weight_of
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, kept


def packed_tensors(model: PreTrainedModel, paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of the DecodeLinears at some paths, by path and name."""
    return {
        f"{path}.{name}": tensor
        for path in paths
        for name, tensor in model.get_submodule(path).named_buffers()
    }


def restore_linears(
    places: Sequence[Place],
    kinds: Mapping[str, WeightKind],
    group: int,
    arena: Arena | None,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Like `exchange_linears`, with tensors from `packed_tensors`."""
    for place in places:
        weight, kind = weight_of(place.layer), kinds[place.path]
        found = {
            name.removeprefix(f"{place.path}."): kept(
                tensor, weight.device, None if name.endswith("bias") else arena
            )
            for name, tensor in tensors.items()
            if name.startswith(f"{place.path}.")
        }
        about = kind, weight.shape[1], 0 if kind == "bf16" else group
        rows = found.get("finer.rows")
        finer = None if rows is None else FinerRows(rows, _restored("finer.", len(rows), *about, found))
        place.put(DecodeLinear(replace(_restored("", weight.shape[0], *about, found), finer=finer)))


def _restored(
    prefix: str, outputs: int, kind: WeightKind, inputs: int, group: int, tensors: Mapping[str, torch.Tensor]
) -> Matrix:
    scale, bias, unit = (tensors.get(prefix + name) for name in ("scale", "bias", "unit"))
    return Matrix(kind, outputs, inputs, group, tensors[f"{prefix}numbers"], scale, bias, unit)
