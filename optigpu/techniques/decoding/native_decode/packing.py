"""Packing a model's linear layers for the operator, or taking them as they were packed before.

What is packed depends on the model, on the options, and on sources: see `packed_store.key_of`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.program import FEW_BITS, FinerRows, Matrix, WeightKind
from optigpu.ops.four_bits.compensated import share_left
from optigpu.surgery.bit_allocation import (
    BitDecision,
    Candidate,
    decide,
    least_bytes,
    table,
    total_bytes,
)
from optigpu.surgery.places import ExpertPlace, Place, weight_of
from optigpu.techniques.decoding.native_decode.calibration import (
    SELF,
    SEQUENTIAL,
    Moments,
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


@dataclass(frozen=True)
class Kept:
    """Layers as they were packed before: their kinds by their paths, and their `packed_tensors`."""

    kinds: Mapping[str, WeightKind]
    tensors: Mapping[str, torch.Tensor]


NONE_KEPT = Kept({}, {})


Gathering = Callable[[Sequence[Place]], Iterator[tuple[list[Place], Moments]]]
"""Yields some of the layers at a time with the moments of their inputs, as `moments_by_layer` does."""


@dataclass(frozen=True)
class Calibration:
    """The gathering of moments over so many tokens of a text."""

    moments: Gathering
    tokens: int


Costs = dict[str, list[float]]
"""By a layer's path what each of its kinds costs, in nats for each token."""


class Packer:
    """Exchanges a model's linear layers for packed ones, in place. `doing` is told how far that is."""

    def __init__(
        self,
        model: PreTrainedModel,
        places: Sequence[Place],
        options: PackingOptions,
        doing: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model, self.places, self.options, self.doing = model, places, options, doing
        self.tied = TiedTable(model) if has_tied_head(model) else None
        self.kinds = [options.kind(place.layer is model.get_output_embeddings()) for place in places]
        # The layers that may have more bits, and all kinds that these may have.
        self.raised = [
            place for place, kind in zip(places, self.kinds, strict=True) if kind == options.lowest
        ]
        self.levels: tuple[WeightKind, ...] = (options.lowest, *RAISED.get(options.lowest, ()))
        self._weights = sum(weight_of(place.layer).numel() for place in places)

    def open_experts(self) -> None:
        """So that each expert is given its own tokens."""
        if self.options.calibration != "none":
            for place in self.places:
                if isinstance(place, ExpertPlace):
                    place.put(place.layer)

    def pack(self) -> Packed:
        """With the options' kind of weights, and extra bytes for some layers."""
        options, text = self.options, None
        self.open_experts()
        if options.calibration != "none" and any(kind in FEW_BITS for kind in self.kinds):
            text = self.calibration_text()
        moments = None if text is None else partial(moments_by_layer, self.model, text=text)
        costs = self.costs(moments) if options.extra_bytes else {}
        candidates = self.candidates(costs)
        decisions = decide(candidates, int((1 + options.extra_bytes) * least_bytes(candidates)))
        return self.exchange(decisions, None if text is None else self.calibration(text))

    def calibration_text(self) -> torch.Tensor:
        self.doing("writing a text to calibrate on")
        return calibration_text(self.model, SEQUENTIAL if self.options.calibration == "sequential" else SELF)

    def calibration(self, text: torch.Tensor) -> Calibration:
        gather = moments_by_layer
        if self.options.calibration == "sequential":
            gather = sequential_moments
            if self.tied is not None:
                self.tied.run(text[:TIED_ROWS])
        return Calibration(partial(gather, self.model, text=text, reading=self.tied), text.numel())

    def candidates(self, costs: Costs) -> list[Candidate]:
        config = self.model.config
        finer = {} if self.tied is None else {HEAD_PATH: finer_rows(config.vocab_size)}
        return candidates_of(self.places, self.kinds, self.options.group, costs, finer)

    def costs(self, moments: Gathering | None, tokens: torch.Tensor | None = None) -> Costs:
        """What the kind and those that it may be raised to cost, for each layer that may be raised.

        Calibration takes away more of it where a layer's inputs tell of each other. `tokens` are text for
        `divergences`.
        """
        levels = self.levels
        found = divergences(self.model, self.raised, levels, self.options.group, tokens)
        last, share = None, 1.0  # queries, keys and values have the same inputs
        for part, gathered in moments(self.raised) if moments else ():
            for place in part:
                if gathered[place.path] is not last:
                    last = gathered[place.path]
                    share = share_left(last)
                costs = zip(levels, found[place.path], strict=True)
                found[place.path] = [cost * share if kind in FEW_BITS else cost for kind, cost in costs]
        return found

    def exchange(
        self, decisions: Sequence[BitDecision], calibration: Calibration | None, earlier: Kept = NONE_KEPT
    ) -> Packed:
        """Packs layer by layer, those that are calibrated first; their inputs come from layers of all kinds.

        Layers that have their kind in `earlier` are copied from there.
        """
        kinds: dict[str, Any] = {decision.path: decision.level.kind for decision in decisions}
        size, group = total_bytes(decisions), self.options.group
        arena = _arena_for(self.places, size)
        copied = [place for place in self.places if earlier.kinds.get(place.path) == kinds[place.path]]
        done = {place.path for place in copied}
        calibrated = [
            place
            for place in self.places
            if calibration and kinds[place.path] in FEW_BITS and place.path not in done
        ]
        tied = self.tied if kinds[HEAD_PATH] in FEW_BITS and HEAD_PATH not in done else None
        begun = 0

        def told(part: Sequence[Place]) -> Iterator[Place]:
            nonlocal begun
            for place in part:
                begun += 1
                self.doing(f"packing layer {begun} of {len(self.places)}")
                yield place

        for place in told(copied):
            place.put(_restored_layer(place, earlier.kinds[place.path], group, earlier.tensors, arena))
        if calibration and calibrated:
            self.doing("reading the text to calibrate on")
            for part, gathered in calibration.moments(calibrated):
                if tied is not None:
                    tied.weigh(gathered, calibration.tokens)
                exchange_linears(told(part), kinds, group, arena, gathered)
        done.update(place.path for place in calibrated)
        others = [place for place in self.places if place.path not in done]
        exchange_linears(told(others), kinds, group, arena, {})
        if tied is not None:
            tied.refine(arena)
        facts = {
            "decode_layers": table(decisions),
            "decode_bytes": size,
            "decode_bits_per_weight": 8 * size / self._weights,
        }
        return Packed(kinds, facts)


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
    """Like `Packer.pack`, with tensors from `packed_tensors`."""
    arena = _arena_for(places, packed.facts["decode_bytes"])
    for place in places:
        place.put(_restored_layer(place, packed.kinds[place.path], group, tensors, arena))


def _restored_layer(
    place: Place, kind: WeightKind, group: int, tensors: Mapping[str, torch.Tensor], arena: Arena | None
) -> DecodeLinear:
    weight = weight_of(place.layer)
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
    return DecodeLinear(replace(_restored("", weight.shape[0], *about, found), finer=finer))


def _restored(
    prefix: str, outputs: int, kind: WeightKind, inputs: int, group: int, tensors: Mapping[str, torch.Tensor]
) -> Matrix:
    scale, bias, unit = (tensors.get(prefix + name) for name in ("scale", "bias", "unit"))
    return Matrix(kind, outputs, inputs, group, tensors[f"{prefix}numbers"], scale, bias, unit)
