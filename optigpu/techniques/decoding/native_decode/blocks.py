"""The blocks of a decoder, run one at a time on what the block before gave, and up to one of their layers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from optigpu.techniques.decoding.native_decode.limits import Runnable, runnable

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

        handles = [
            layer.register_forward_pre_hook(keep(kept)) for layer, kept in zip(layers, given, strict=True)
        ]
        try:
            return [self.run(state) for state in states], given
        finally:
            for handle in handles:
                handle.remove()

    def given(self, state: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        """What a layer is given; the block runs up to it."""
        return _given(layer, lambda: self.run(state))


def running_blocks(model: PreTrainedModel, rows: torch.Tensor) -> list[RunningBlock]:
    """The blocks, for passes over as many rows of as many tokens as `rows` has, int64 [rows, tokens]."""
    found: list[RunningBlock] = []
    family = _family(model)
    root = f"{family.decoder.path}.{family.decoder.blocks}"

    def watch(path: str) -> Callable[..., None]:
        stages = [[f"{path}.{layer}" for layer in stage] for stage in family.stages]
        return lambda block, args, kwargs: found.append(RunningBlock(block, args[1:], kwargs, stages))

    handles = [
        block.register_forward_pre_hook(watch(f"{root}.{name}"), with_kwargs=True)
        for name, block in model.get_submodule(root).named_children()
    ]
    try:
        model.base_model(input_ids=rows, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def embedded(model: PreTrainedModel, first: RunningBlock, rows: torch.Tensor) -> torch.Tensor:
    """What the first block is given."""
    return _given(first.module, lambda: model.base_model(input_ids=rows, use_cache=False))


def final_norm(model: PreTrainedModel) -> torch.nn.Module:
    """What makes the last block's output the head's input."""
    decoder = _family(model).decoder
    return model.get_submodule(f"{decoder.path}.{decoder.final}")


def _given(layer: torch.nn.Module, run: Callable[[], object]) -> torch.Tensor:
    found: States = []

    def reach(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.append(inputs[0])
        raise _ReachedError

    handle = layer.register_forward_pre_hook(reach)
    try:
        with suppress(_ReachedError):
            run()
    finally:
        handle.remove()
    return found[0]


def _family(model: PreTrainedModel) -> Runnable:
    found = runnable(model.config.model_type)
    assert found is not None, "the model was checked"
    return found
