"""Packing a model with the fewest bits that keep its next tokens close to what they were.

The cost of rounding each layer is predicted (sensitivity.py), and bytes go where they save the most of it. Then the
packed model is measured: how far its next tokens diverge from the model's own on text that the model wrote. It is
packed again, with more bytes or fewer, until it is within the limit. On the beginnings of many texts SmolLM2-135M and
Gemma 3 270M diverge 1.5 times as much as on WikiText-2, with a standard error of 15%, so that a limit that holds on the
one holds on the other.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel

from optigpu.hardware.cgroup import free_host_bytes
from optigpu.ops.decode.cpu.decoder import CpuDecoder, Part
from optigpu.ops.decode.program import Program, WeightKind
from optigpu.surgery.bit_allocation import (
    BitDecision,
    Candidate,
    Stage,
    bytes_that_save,
    decide,
    least_bytes,
)
from optigpu.surgery.places import ExpertPlace, Place
from optigpu.techniques.decoding.native_decode.calibration import (
    SELF,
    KeptMoments,
    TextSize,
    calibration_text,
    in_eight_bits,
    program_of_packed,
)
from optigpu.techniques.decoding.native_decode.packing import (
    NONE_KEPT,
    Calibration,
    Kept,
    Packed,
    Packer,
    packed_tensors,
)
from optigpu.techniques.decoding.native_decode.programs import new_decoder
from optigpu.techniques.decoding.native_decode.sensitivity import LENGTH, ROWS
from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    from optigpu.techniques.decoding.native_decode.programs import Decoder

CHECKED = TextSize(32, 32)
"""The text that a packed model is measured on. Some texts diverge ten times as much as others: with 8 sequences of 128
tokens Gemma 3 270M had a standard error of 40%."""
CHECKED_SEED = 2
CHECKED_BYTES, LOGITS_BYTES = 2**29, 2**27
"""The most bytes of the expected probabilities, so that a large vocabulary has fewer sequences, and of the logits that
are computed at once: the more sequences, the faster the pass."""
AIM, SLACK = 0.95, 0.6
"""The shares of the limit that are aimed at, and below which fewer bits are tried."""
ATTEMPTS, CORRECTED, UNTOLD, MOST_RAISED = 5, 3, 1.5, 4.0
"""The most packings, and those of them that are chosen by the prediction; how many times as much as predicted the first
may diverge; how many times as much as one the next may be predicted to.
"""


class Reference:
    """Text, int64 [rows, length], and the probabilities that the unpacked model gives to each next token of it."""

    def __init__(self, model: PreTrainedModel, text: torch.Tensor) -> None:
        row_bytes = 4 * model.config.vocab_size * text.shape[1]
        self._text = text.split(max(1, LOGITS_BYTES // row_bytes))
        with torch.no_grad():
            logits = (model(input_ids=rows, use_cache=False).logits.float() for rows in self._text)
            self._expected = [each.log_softmax(dim=-1).half() for each in logits]

    def divergence(self, program: Program) -> float:
        """The mean Kullback-Leibler divergence of a program's next tokens from the model's, in nats for each token."""
        decoder = new_decoder(program, "bf16")
        total = 0.0
        for rows, half in zip(self._text, self._expected, strict=True):
            expected, found = half.float(), _log_probabilities(decoder, rows)
            total += float((expected.exp() * (expected - found)).sum())
        count: int = sum(rows.numel() for rows in self._text)
        return total / count


def _log_probabilities(decoder: "Decoder", rows: torch.Tensor) -> torch.Tensor:
    """After each token of sequences, int64 [rows, length]: float32 [rows, length, vocabulary]."""
    decoder.begin(*rows.shape)
    if isinstance(decoder, CpuDecoder):
        decoder.advance([Part(number, 0, row, len(row)) for number, row in enumerate(rows.tolist())])
        return decoder.logits.view(*rows.shape, -1).log_softmax(dim=-1)
    steps = [decoder.extend(token).clone() for token in rows.split(1, dim=1)]
    return torch.stack(steps, dim=1).log_softmax(dim=-1)


class Prediction:
    """What layers of each kind are predicted to cost, in nats for each token, and the kinds of the fewest bytes."""

    def __init__(self, layers: Sequence[Candidate], *, is_uniform: bool = False) -> None:
        """With `is_uniform` all layers that may be raised have one kind."""
        self._layers = layers
        self._candidates = [_as_one(layers)] if is_uniform else layers
        self.least_bytes = least_bytes(self._candidates)
        self.largest_bytes = sum(each.levels[-1].stored_bytes for each in self._candidates)
        self.most_bytes, self._most = bytes_that_save(self._candidates, math.inf)

    def bytes_within(self, divergence: float) -> tuple[int, float]:
        """The fewest bytes within it, or `most_bytes`, which leave out what is predicted to gain nothing; and by how
        much the model is predicted to diverge more than with these."""
        size, saved = bytes_that_save(self._candidates, self._most - divergence)
        return size, self._most - saved

    def kinds(self, size: int) -> list[BitDecision]:
        """The kinds that cost the least in so many bytes."""
        decisions = decide(self._candidates, size)
        if self._candidates is self._layers:
            return decisions
        (whole,) = decisions
        return [_of_kind(layer, whole) for layer in self._layers]


TYPICAL: Mapping[WeightKind, float] = {"w3k": 0.57, "w4k": 0.105, "w5": 0.045, "w6": 0.012, "w8": 0.001}
"""The predicted divergence of SmolLM2-135M with one kind in all layers, calibrated."""


def _as_one(layers: Sequence[Candidate]) -> Candidate:
    """One candidate for all layers that may be raised, with typical gains."""
    levels = tuple(
        replace(each[0], stored_bytes=sum(level.stored_bytes for level in each))
        for each in zip(*(layer.levels for layer in layers if len(layer.levels) > 1), strict=True)
    )
    kinds = [cast(WeightKind, level.kind) for level in levels]
    gains = tuple(
        (TYPICAL[kind] - TYPICAL[finer]) / (upper.stored_bytes - lower.stored_bytes)
        for (kind, finer), (lower, upper) in zip(pairwise(kinds), pairwise(levels), strict=True)
    )
    return Candidate("", levels, Stage.REST, gains=gains)


def _of_kind(layer: Candidate, whole: BitDecision) -> BitDecision:
    if len(layer.levels) == 1:
        return BitDecision(layer.path, layer.levels[0], whole.reason)
    level = next(level for level in layer.levels if level.kind == whole.level.kind)
    return BitDecision(layer.path, level, whole.reason)


def pack_within(packer: Packer) -> Packed:
    """Packs with the fewest bits that keep the model within the options' `max_kld`.

    Raises UnsupportedError, with the model left as it was, where 8 bits do not.
    """
    model, options = packer.model, packer.options
    experts = {place.within.path: place.within for place in packer.places if isinstance(place, ExpertPlace)}
    before = [(place, place.layer) for place in experts.values()]
    packer.open_experts()
    whole = [(place, place.layer) for place in packer.places]

    def put_back(layers: Iterable[tuple[Place, torch.nn.Module]] = whole) -> None:
        for place, layer in layers:
            place.put(layer)

    packer.doing("writing a text to choose bits by")
    eights = in_eight_bits(model, options.group)
    size = TextSize(ROWS, LENGTH) if options.calibration == "none" else SELF
    checked, text = _texts(model, eights, size)
    packer.doing("reading the text to choose bits by")
    reference = Reference(model, checked)
    least = reference.divergence(eights)
    del eights
    moments = calibration = None
    if options.calibration != "none":
        moments = KeptMoments(model, packer.raised, text, packer.tied).of
        calibration = Calibration(moments, text.numel())
    if experts:
        typical = [TYPICAL[kind] for kind in packer.levels]
        costs = {place.path: typical for place in packer.raised}
    else:
        costs = packer.costs(moments, text[:ROWS, :LENGTH])
    prediction = Prediction(packer.candidates(costs), is_uniform=bool(experts))

    earlier = NONE_KEPT

    def packed(decisions: Sequence[BitDecision], calibration: Calibration | None = calibration) -> Attempt:
        nonlocal earlier
        put_back()
        made = packer.exchange(decisions, calibration, earlier)
        earlier = _kept(model, made)
        packer.doing("measuring the packed model")
        program = program_of_packed(model, options.tables, options.group, tied=packer.tied is not None)
        return Attempt(decisions, made, reference.divergence(program))

    found = _closest(prediction, options.max_kld, least, packed)
    is_within = found.divergence <= options.max_kld
    if options.calibration == "sequential" and is_within:
        put_back()
        earlier = NONE_KEPT
        found = packed(found.decisions, packer.calibration(packer.calibration_text()))
    if not is_within:
        put_back((*whole, *before))
        raise UnsupportedError(
            f"native_decode: weights of 8 bits do not keep this model within max_kld {options.max_kld:g}; with them "
            f"the lowest is {found.divergence:.2g}. Set max_kld to more than that, or weights to bf16."
        )
    return replace(found.packed, facts=found.packed.facts | {"decode_divergence": found.divergence})


def _kept(model: PreTrainedModel, packed: Packed) -> Kept:
    """For the next packing, where there is memory for two."""
    if model.device.type != "cpu" or packed.facts["decode_bytes"] > free_host_bytes():
        return NONE_KEPT
    return Kept(packed.kinds, packed_tensors(model, list(packed.kinds)))


@dataclass(frozen=True)
class Attempt:
    """A packed model, and how far it diverges."""

    decisions: Sequence[BitDecision]
    packed: Packed
    divergence: float


def _texts(model: PreTrainedModel, program: Program, size: TextSize) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model is measured on, and what its costs and its calibration are from, which has that size."""
    rows = max(1, min(CHECKED.rows, CHECKED_BYTES // (2 * model.config.vocab_size * CHECKED.length)))
    checked = calibration_text(model, TextSize(rows, CHECKED.length), program, CHECKED_SEED)
    return checked, calibration_text(model, size, program)


def _closest(
    prediction: Prediction, limit: float, least: float, packed: Callable[[Sequence[BitDecision]], Attempt]
) -> Attempt:
    """The packed model of the fewest bytes within the limit, or that of the largest kinds, which diverges by about
    `least`: first by the prediction, then by what that was wrong by, then half way between too few bytes and enough."""
    aim = AIM * limit - least
    if aim <= 0:
        return packed(prediction.kinds(prediction.largest_bytes))
    too_few, enough = prediction.least_bytes, prediction.most_bytes
    size, predicted = prediction.bytes_within(aim / UNTOLD)
    for number in range(1, ATTEMPTS + 1):
        attempt = packed(prediction.kinds(size))
        is_within = attempt.divergence <= limit
        if is_within and (size == prediction.least_bytes or attempt.divergence >= SLACK * limit):
            return attempt
        too_few, enough = (too_few, size) if is_within else (size, enough)
        if number < CORRECTED:
            cost = max(attempt.divergence - least, aim / MOST_RAISED)
            size, predicted = prediction.bytes_within(predicted * aim / cost)
        else:
            size = (too_few + enough) // 2
    found = packed(prediction.kinds(enough))
    return found if found.divergence <= limit else packed(prediction.kinds(prediction.largest_bytes))
