"""Packing a model's linear layers for the operator, or taking them as they were packed before.

What is packed depends on the model, on the options, and on sources: see `packed_store.key_of`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.program import FEW_BITS, FinerRows, Matrix, WeightKind
from optigpu.ops.four_bits.compensated import share_left
from optigpu.surgery.bit_allocation import BitDecision, decide, least_bytes, table, total_bytes
from optigpu.surgery.places import ExpertPlace, Place, weight_of
from optigpu.techniques.decoding.native_decode.calibration import (
    SELF,
    SEQUENTIAL,
    calibration_text,
    moments_by_layer,
)
from optigpu.techniques.decoding.native_decode.layers import (
    DecodeLinear,
    candidates_of,
    exchange_linears,
    kept,
)
from optigpu.techniques.decoding.native_decode.prediction import RAISED, PackingOptions, finer_rows
from optigpu.techniques.decoding.native_decode.programs import HEAD_PATH, has_tied_head
from optigpu.techniques.decoding.native_decode.sensitivity import TIED_ROWS, TiedTable, divergences
from optigpu.techniques.decoding.native_decode.sequential import sequential_moments


@dataclass(frozen=True)
class Packed:
    """The kind of each layer by its path, and their facts."""

    kinds: dict[str, WeightKind]
    facts: dict[str, Any]


def pack_layers(
    model: PreTrainedModel,
    places: Sequence[Place],
    options: PackingOptions,
    doing: Callable[[str], None] = lambda _: None,
) -> Packed:
    """Exchanges the linear layers for packed ones, in place. `doing` is told how far that is."""
    kinds = [options.kind(place.layer is model.get_output_embeddings()) for place in places]
    is_calibrated = options.calibration != "none" and any(kind in FEW_BITS for kind in kinds)
    if is_calibrated:
        for place in places:  # so that each expert is given its own tokens
            if isinstance(place, ExpertPlace):
                place.put(place.layer)
    size = SEQUENTIAL if options.calibration == "sequential" else SELF
    if is_calibrated:
        doing("writing a text to calibrate on")
    text = calibration_text(model, size) if is_calibrated else None
    costs = _costs(model, places, kinds, options, text) if options.extra_bytes else {}
    finer = {HEAD_PATH: finer_rows(model.config.vocab_size)} if has_tied_head(model) else {}
    candidates = candidates_of(places, kinds, options.group, costs, finer)
    decisions = decide(candidates, int((1 + options.extra_bytes) * least_bytes(candidates)))
    weights = sum(weight_of(place.layer).numel() for place in places)
    chosen = _exchange(model, places, decisions, options, text, doing)
    facts = {
        "decode_layers": table(decisions),
        "decode_bytes": total_bytes(decisions),
        "decode_bits_per_weight": 8 * total_bytes(decisions) / weights,
    }
    return Packed(chosen, facts)


def _costs(
    model: PreTrainedModel,
    places: Sequence[Place],
    kinds: Sequence[WeightKind],
    options: PackingOptions,
    text: torch.Tensor | None,
) -> dict[str, list[float]]:
    """The costs of the kind and of those that it may be raised to, for each layer that may be raised.

    Calibration takes away more of them where a layer's inputs tell of each other.
    """
    low = [place for place, kind in zip(places, kinds, strict=True) if kind == options.weights]
    levels = options.weights, *RAISED[options.weights]
    found = divergences(model, low, levels, options.group)
    if text is not None:
        for part, moments in moments_by_layer(model, low, text):
            for place in part:
                share, costs = share_left(moments[place.path]), zip(levels, found[place.path], strict=True)
                found[place.path] = [cost * share if kind in FEW_BITS else cost for kind, cost in costs]
    return found


def _exchange(
    model: PreTrainedModel,
    places: Sequence[Place],
    decisions: Sequence[BitDecision],
    options: PackingOptions,
    text: torch.Tensor | None,
    doing: Callable[[str], None],
) -> dict[str, WeightKind]:
    """Packs layer by layer, those that are calibrated first; their inputs come from layers of all kinds."""
    kinds: dict[str, Any] = {decision.path: decision.level.kind for decision in decisions}
    arena = _arena_for(places, total_bytes(decisions))
    calibrated = [place for place in places if text is not None and kinds[place.path] in FEW_BITS]
    tied = TiedTable(model) if has_tied_head(model) and kinds[HEAD_PATH] in FEW_BITS else None
    begun = 0

    def told(part: Sequence[Place]) -> Iterator[Place]:
        nonlocal begun
        for place in part:
            begun += 1
            doing(f"packing layer {begun} of {len(places)}")
            yield place

    if text is not None:
        doing("reading the text to calibrate on")
        is_sequential = options.calibration == "sequential"
        by_layer = sequential_moments if is_sequential else moments_by_layer
        if tied is not None and is_sequential:
            tied.run(text[:TIED_ROWS])
        for part, moments in by_layer(model, calibrated, text, tied):
            if tied is not None:
                tied.weigh(moments, text.numel())
            exchange_linears(told(part), kinds, options.group, arena, moments)
    done = {place.path for place in calibrated}
    others = [place for place in places if place.path not in done]
    exchange_linears(told(others), kinds, options.group, arena, {})
    if tied is not None:
        tied.refine(arena)
    return kinds


def _arena_for(places: Sequence[Place], size: int) -> Arena | None:
    """One piece of memory for the layers' packed weights, on a CPU alone."""
    return Arena(size) if weight_of(places[0].layer).device.type == "cpu" else None


def packed_tensors(model: PreTrainedModel, paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of the DecodeLinears at some paths, by path and name."""
    return {
        f"{path}.{name}": tensor
        for path in paths
        for name, tensor in model.get_submodule(path).named_buffers()
    }


def restore_layers(
    places: Sequence[Place], group: int, packed: Packed, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Like `pack_layers`, with tensors from `packed_tensors`."""
    arena = _arena_for(places, packed.facts["decode_bytes"])
    for place in places:
        weight, kind = weight_of(place.layer), packed.kinds[place.path]
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
