"""Calibration of layers one after the other, each of which makes up for what rounding the earlier ones has changed.

In the rounded model a layer is given x instead of f. Of all weights W + W D (sum of x xT)^-1 come closest to giving
W f, where D is the sum of (f - x) xT over a text, and rounding starts there instead of at W (Li et al., GPTAQ, 2025,
arXiv:2504.02692).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from optigpu.ops.four_bits.compensated import compensation
from optigpu.ops.four_bits.few_bits import product_type
from optigpu.surgery.places import Place, linear_of, weight_of
from optigpu.techniques.decoding.native_decode.calibration import (
    ROWS_AT_ONCE,
    Gathered,
    Moments,
    Reading,
    in_product_type,
)
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear
from optigpu.techniques.decoding.native_decode.programs import HEAD_PATH, has_tied_head, roles_of

States = list[torch.Tensor]
"""What goes from block to block, [rows, tokens, width] for some rows of a text at a time."""


class _ReachedError(Exception):
    """A pass has come as far as it was to go."""


@dataclass(frozen=True)
class RunningBlock:
    """A block with what it is called with besides a state; `stages` are paths of layers that share their inputs."""

    module: torch.nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    stages: list[list[str]]

    def run(self, state: torch.Tensor) -> torch.Tensor:
        found = self.module(state, *self.args, **self.kwargs)
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output

    def watched(self, states: States, layers: Sequence[torch.nn.Module]) -> tuple[States, list[States]]:
        """What the block makes of each state, and what each layer is given by each."""
        given: list[States] = [[] for _ in layers]

        def keep(kept: States) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
            return lambda _, inputs: kept.append(inputs[0])

        with ExitStack() as hooks:
            for layer, kept in zip(layers, given, strict=True):
                hooks.enter_context(layer.register_forward_pre_hook(keep(kept)))
            return [self.run(state) for state in states], given


def running_blocks(model: PreTrainedModel, rows: torch.Tensor) -> list[RunningBlock]:
    """The blocks, for passes over as many rows of as many tokens as `rows` has, int64 [rows, tokens]."""
    found: list[RunningBlock] = []
    roles = roles_of(model)
    root = f"{roles.path}.{roles.blocks}"

    def watch(path: str) -> Callable[..., None]:
        stages = [[f"{path}.{layer}" for layer in stage] for stage in roles.stages]
        return lambda block, args, kwargs: found.append(RunningBlock(block, args[1:], kwargs, stages))

    with ExitStack() as hooks:
        for name, block in model.get_submodule(root).named_children():
            watched = block.register_forward_pre_hook(watch(f"{root}.{name}"), with_kwargs=True)
            hooks.enter_context(watched)
        model.base_model(input_ids=rows, use_cache=False)
    return found


def _given(layer: torch.nn.Module, run: Callable[[], object]) -> torch.Tensor:
    """What a layer is given; the model runs up to it."""
    found: States = []

    def reach(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.append(inputs[0])
        raise _ReachedError

    with layer.register_forward_pre_hook(reach), suppress(_ReachedError):
        run()
    return found[0]


SHARE = 0.75
"""Of the change that is made; the rest fits the text alone. With a half, three quarters and all of it bundled:tiny as
w4k diverged by 0.00303, 0.00294 and 0.00293, bundled:small by 0.00602, 0.00592 and 0.00581; as w3k the small one did by
0.0262 with three quarters and by 0.0265 with all."""


def sequential_moments(
    model: PreTrainedModel, places: Sequence[Place], text: torch.Tensor, reading: Reading | None = None
) -> Iterator[tuple[list[Place], Moments]]:
    """As `moments_by_layer`, by layers that share their inputs, whose weights have been changed in place.

    The caller packs them before it goes on. A tied head keeps its weights, which are looked up as well.
    """
    wanted = {place.path: place for place in places}
    passes = _Passes(model, text)
    for block in passes.blocks:
        stages = [
            found for stage in block.stages if (found := [wanted[path] for path in stage if path in wanted])
        ]
        expected = passes.exact_through(block, [stage[0] for stage in stages])
        packed: list[tuple[Place, torch.nn.Module]] = []
        for stage, wished in zip(stages, expected, strict=True):
            yield stage, passes.moments(block, stage, wished)
            packed += [(place, place.layer) for place in stage]
            for place in stage:
                place.put(_widened(place.layer))
        passes.rounded_through(block)
        for place, layer in packed:
            place.put(layer)
    if HEAD_PATH in wanted:
        yield [wanted[HEAD_PATH]], passes.head_moments(wanted[HEAD_PATH], reading or Reading(model))


class _Passes:
    """Two passes over a text, side by side: of the unrounded model, and of the one whose layers are being packed."""

    def __init__(self, model: PreTrainedModel, text: torch.Tensor) -> None:
        self._model = model
        parts = text.split(ROWS_AT_ONCE)
        with torch.no_grad(), in_product_type(model):
            self.blocks = running_blocks(model, parts[0])
            runs = (partial(model.base_model, input_ids=part, use_cache=False) for part in parts)
            self._exact = [_given(self.blocks[0].module, run) for run in runs]
        self._rounded = self._exact

    def exact_through(self, block: RunningBlock, places: Sequence[Place]) -> list[States]:
        """Takes a block that is not rounded yet; what it gives each of the layers."""
        with torch.no_grad(), in_product_type(self._model):
            self._exact, given = block.watched(self._exact, [place.layer for place in places])
        return given

    def rounded_through(self, block: RunningBlock) -> None:
        self._rounded = list(self._each(block.run, self._rounded))

    def moments(self, block: RunningBlock, stage: Sequence[Place], wished: States) -> Moments:
        """Of what the layers of a stage are given; changes their weights."""
        given = self._each(lambda state: _given(stage[0].layer, lambda: block.run(state)), self._rounded)
        return dict.fromkeys([place.path for place in stage], _aimed(stage, given, wished))

    def head_moments(self, head: Place, reading: Reading) -> Moments:
        roles = roles_of(self._model)
        final = self._model.get_submodule(f"{roles.path}.{roles.final}")  # makes the head's input
        changed = [] if has_tied_head(self._model) else [head]
        given, wished = map(reading.see, self._each(final, self._rounded)), self._each(final, self._exact)
        return {HEAD_PATH: _aimed(changed, given, wished)}

    def _each(self, run: Callable[[torch.Tensor], torch.Tensor], states: States) -> Iterator[torch.Tensor]:
        for state in states:
            with torch.no_grad(), in_product_type(self._model):
                found = run(state)
            yield found


@torch.no_grad()
def _aimed(
    places: Sequence[Place], given: Iterable[torch.Tensor], wished: Iterable[torch.Tensor]
) -> torch.Tensor:
    """The moment of what layers are given. Their weights are changed to make up for what was wished instead."""
    gathered, drift = Gathered(), None
    for x, f in zip(given, wished, strict=True):
        gathered.add(HEAD_PATH, x)
        products = product_type(x.device)
        more = ((f - x).flatten(0, -2).to(products).T @ x.flatten(0, -2).to(products)).float()
        drift = more if drift is None else drift.add_(more)
    moment = gathered.whole()[HEAD_PATH]
    if places and drift is not None and bool(drift.any()):
        known, size = compensation(moment), moment.diagonal().mean()
        for place in places:
            weight = weight_of(place.layer)
            # Times moment^-1, by the factor of the moment.
            rows = weight.float() @ (drift / size)
            half = torch.linalg.solve_triangular(known.factor.T, rows.T, upper=True)
            weight.add_(torch.linalg.solve_triangular(known.factor, half, upper=False).T.mul_(SHARE))
    return moment


def _widened(layer: torch.nn.Module) -> torch.nn.Linear:
    """A layer with the weights of a packed one, which are widened once for all passes."""
    assert isinstance(layer, DecodeLinear)
    return linear_of(layer.unpacked(), None if layer.bias is None else layer.bias[: layer.outputs])
