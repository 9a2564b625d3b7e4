"""What inputs a decoder's layers get, from text that the model wrote itself: their second moments."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from optigpu.models.loading.self_written import first_token
from optigpu.ops.decode.program import GROUPS, Program, Sampling, WeightKind
from optigpu.ops.four_bits.few_bits import product_type
from optigpu.surgery.places import Place, expert_places, linear_places, weight_of
from optigpu.techniques.decoding.native_decode.layers import exchange_linears
from optigpu.techniques.decoding.native_decode.programs import (
    HEAD_PATH,
    exchange_tables,
    has_tied_head,
    new_decoder,
    program_of,
)

Moments = dict[str, torch.Tensor]
Inputs = tuple[torch.Tensor, ...]


class TextSize(NamedTuple):
    """Sequences of a text, and the tokens of each, or as many as the model takes."""

    rows: int
    length: int


SELF = TextSize(16, 128)
"""24 sequences take half as long again; SmolLM2-135M as w4 then diverges by 4% less (decision 71)."""
SEQUENTIAL = TextSize(128, 256)
"""A quarter of it gave bundled:tiny as w4k 9% more divergence, and bundled:small 6%."""
SEED = 1
"""A different text from those of sensitivity and quality."""
ROWS_AT_ONCE = 8
"""Of a pass: few enough for what a layer gives to stay in the caches."""
STRIPES, LEAST_STRIPE = 8, 192
"""Of the columns of a moment: how many there are, and the least columns of one."""
SQUARE = 256
"""Rows and columns of a moment that are mirrored at once."""
MOMENTS_MEMORY_SHARE = 1.25
"""The share of the weights' memory that the moments of one pass may take; a single layer's may take more."""


def calibration_text(
    model: PreTrainedModel, size: TextSize = SELF, program: Program | None = None, seed: int | None = None
) -> torch.Tensor:
    """What the model writes, int64 [rows, length], by the operator, with 8-bit weights: `program`, if it is there.

    That is many times faster than the model itself, and what a model writes hardly depends on those roundings.
    """
    length, seed = min(size.length, model.config.max_position_embeddings), SEED if seed is None else seed
    decoder = new_decoder(program or in_eight_bits(model), "bf16")
    decoder.begin(size.rows, length)
    start = torch.full((size.rows, 1), first_token(model, model.config.vocab_size, seed), device=model.device)
    return torch.cat([start, decoder.decode(start, length - 1, Sampling(temperature=1.0, seed=seed))], dim=1)


def in_eight_bits(model: PreTrainedModel, group: int | None = None) -> Program:
    """The program of a copy of the model. Without `group` they are as large as inputs allow: each is scaled once."""
    copied = _copied(model)
    places = [*expert_places(copied), *linear_places(copied)]
    group = group or max(
        size for size in GROUPS if all(not weight_of(each.layer).shape[1] % size for each in places)
    )
    exchange_linears(places, {place.path: "w8" for place in places}, group, None, {})
    exchange_tables(copied, "w8", group, tied=has_tied_head(model))
    return program_of(copied)


def program_of_packed(model: PreTrainedModel, tables: WeightKind, group: int, *, tied: bool) -> Program:
    """The program of a copy of a model whose linear layers are packed; its tables stay as they are."""
    copied = _copied(model)
    exchange_tables(copied, tables, group, tied=tied)
    return program_of(copied)


def _copied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all tensors."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


class Reading:
    """How a text is read: `run` passes it through the base model, `see` gets and gives back what the head is given."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def run(self, rows: torch.Tensor) -> None:
        """Rows of the text, int64 [rows, tokens]."""
        with torch.no_grad(), in_product_type(self._model):
            self._model.base_model(input_ids=rows, use_cache=False)

    def see(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class KeptMoments:
    """As `moments_by_layer`; moments that one pass has room for are gathered once, for all calls."""

    def __init__(
        self, model: PreTrainedModel, places: Sequence[Place], text: torch.Tensor, reading: Reading | None
    ) -> None:
        self._pass = model, text, reading
        self._kept: Moments = {}
        if len(list(_parts(places, most_moments(places)))) == 1:
            for _, self._kept in moments_by_layer(model, places, text, reading):
                pass

    def of(self, places: Sequence[Place]) -> Iterator[tuple[list[Place], Moments]]:
        if self._kept:
            yield list(places), dict(self._kept)
        else:
            model, text, reading = self._pass
            yield from moments_by_layer(model, places, text, reading)


def moments_by_layer(
    model: PreTrainedModel, places: Sequence[Place], text: torch.Tensor, reading: Reading | None = None
) -> Iterator[tuple[list[Place], Moments]]:
    """Some layers at a time with the sums of x xT over all tokens, float32 [inputs, inputs], by their paths.

    Layers that get the same inputs share one. A pass over the text is made for each part of the model, so that the
    caller may exchange layers in between: later ones are then calibrated on what those give.
    """
    reading = reading or Reading(model)
    for part in _parts(places, most_moments(places)):
        gathered = Gathered()
        with _watched(model, part, gathered, reading):
            for rows in text.split(ROWS_AT_ONCE):
                reading.run(rows)
        yield part, gathered.whole()


def most_moments(places: Sequence[Place]) -> int:
    """Bytes of the moments of one pass."""
    return int(MOMENTS_MEMORY_SHARE * sum(weight_of(place.layer).nbytes for place in places))


def _parts(places: Sequence[Place], most: int) -> Iterator[list[Place]]:
    part: list[Place] = []
    size = 0
    for place in places:
        needed = 4 * weight_of(place.layer).shape[1] ** 2
        if part and size + needed > most:
            yield part
            part, size = [], 0
        part.append(place)
        size += needed
    if part:
        yield part


def in_product_type(model: PreTrainedModel) -> AbstractContextManager[object]:
    """A context in which the model's products are of `product_type`."""
    wanted = product_type(model.device)
    return torch.autocast(model.device.type, wanted, enabled=wanted != torch.float32)


class Gathered:
    """The moments of a pass. Queries, keys and values come one after the other and get the same tensor."""

    def __init__(self) -> None:
        self._found: Moments = {}
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, path: str, inputs: torch.Tensor) -> None:
        if self._last is None or inputs is not self._last[0]:
            x = inputs.detach().flatten(0, -2)
            moment = self._found.get(path)
            if moment is None:
                moment = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            _add(moment, x)
            self._last = inputs, moment
        self._found[path] = self._last[1]

    def whole(self) -> Moments:
        """With what is on the left of the diagonal."""
        self._last = None
        for moment in {id(each): each for each in self._found.values()}.values():
            _mirror(moment)
        return self._found


def _mirror(moment: torch.Tensor) -> None:
    """Makes what is on the left of the diagonal that on its right, by squares that stay in the caches."""
    for start in range(0, len(moment), SQUARE):
        for left in range(0, start + 1, SQUARE):
            square = moment[left : left + SQUARE, start : start + SQUARE].contiguous()
            if left == start:
                square = square.triu() + square.triu(1).T
            moment[start : start + SQUARE, left : left + SQUARE] = square.T.contiguous()


def _add(moment: torch.Tensor, x: torch.Tensor) -> None:
    """Adds xT x on and right of the diagonal; by stripes that is little more than half of the work."""
    x, size = x.float(), x.shape[1]
    stripe = max(LEAST_STRIPE, -(-size // STRIPES))
    with _rounded_products(product_type(x.device)):
        for start in range(0, size, stripe):
            moment[start : start + stripe, start:].addmm_(x[:, start : start + stripe].T, x[:, start:])


@contextmanager
def _rounded_products(products: torch.dtype) -> Iterator[None]:
    """Torch rounds the operands of a CPU's float32 products to bfloat16, if that is wanted; sums stay float32.

    A moment is then the exact one of rounded inputs, and stays positive definite.
    """
    backend: Any = torch.backends.mkldnn  # whose type does not name its parts
    matmul = backend.matmul
    before = matmul.fp32_precision
    if products == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def _watched(
    model: PreTrainedModel, places: Sequence[Place], gathered: Gathered, reading: Reading
) -> Iterator[None]:
    """Gathers while a pass runs up to the head, of which no logits are needed."""

    def watch(path: str) -> Callable[[torch.nn.Module, Inputs], None]:
        return lambda _, inputs: gathered.add(path, inputs[0])

    with ExitStack() as hooks:
        for place in places:
            if place.path != HEAD_PATH:
                hooks.enter_context(place.layer.register_forward_pre_hook(watch(place.path)))
        if any(place.path == HEAD_PATH for place in places):
            last = model.base_model.register_forward_hook(
                lambda _, __, output: gathered.add(HEAD_PATH, reading.see(output.last_hidden_state))
            )
            hooks.enter_context(last)
        yield
