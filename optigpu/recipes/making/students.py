"""Smaller models with the weights of a larger one: with some of its blocks, or with some neurons of each MLP."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedModel

from optigpu.models.families import Decoder, Mlp, ModelFamily, family_of
from optigpu.surgery.places import weight_of
from optigpu.vocabulary import UnsupportedError


def kept_blocks(blocks: int, layers: int | None) -> tuple[int, ...]:
    """Which blocks a student of so many layers keeps: evenly spaced ones, the first and the last among them.

    Sanh et al., DistilBERT, 2019, arXiv:1910.01108 begin with every other block. Raises UnsupportedError if that is not
    fewer than there are.
    """
    wanted = max(1, blocks // 2) if layers is None else layers
    if wanted >= blocks:
        raise UnsupportedError(
            f"The model has {blocks} layers, and a student of {wanted} is no smaller; ask for fewer layers."
        )
    if wanted == 1:
        return (0,)
    return tuple(round(place * (blocks - 1) / (wanted - 1)) for place in range(wanted))


def shallower(teacher: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model of the teacher's blocks `kept` and of all that is not in a block; a copy."""
    parts = decoder_of(teacher)
    config: Any = copy.deepcopy(teacher.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[block] for block in kept]
    prefix = f"{parts.path}.{parts.blocks}."
    number = {str(block): str(place) for place, block in enumerate(kept)}
    weights = {}
    for name, weight in teacher.state_dict().items():
        if not name.startswith(prefix):
            weights[name] = weight
            continue
        block, _, rest = name.removeprefix(prefix).partition(".")
        if block in number:
            weights[f"{prefix}{number[block]}.{rest}"] = weight
    return _made(teacher, config, weights)


def narrower(teacher: PreTrainedModel, kept: Sequence[torch.Tensor]) -> PreTrainedModel:
    """A model whose MLPs have the neurons `kept` alone, int64 [neurons] for each block, equally many; a copy."""
    family, parts = family_of(teacher.config.model_type), decoder_of(teacher)
    mlp, key = mlp_of(teacher), family.keys.inner_size
    assert key is not None
    config: Any = copy.deepcopy(teacher.config)
    setattr(config, key, len(kept[0]))
    weights = dict(teacher.state_dict())
    for place, neurons in enumerate(kept):
        prefix = ".".join(filter(None, (parts.path, parts.blocks, str(place), mlp.path)))
        for name, dimension in _slices(family, mlp):
            weight = f"{prefix}.{name}"
            if weight in weights:
                weights[weight] = weights[weight].index_select(dimension, neurons)
    return _made(teacher, config, weights)


def blocks_of(model: PreTrainedModel) -> list[Module]:
    """The blocks in their order."""
    parts = decoder_of(model)
    return list(model.get_submodule(f"{parts.path}.{parts.blocks}").children())


def down_layers(model: PreTrainedModel) -> list[Module]:
    """The layer of each block's MLP whose inputs are its neurons."""
    mlp = mlp_of(model)
    return [block.get_submodule(".".join(filter(None, (mlp.path, mlp.down)))) for block in blocks_of(model)]


def inner_size(model: PreTrainedModel) -> int:
    """How many neurons an MLP has."""
    layer: Any = down_layers(model)[0]
    return int(weight_of(layer).shape[1])


def decoder_of(model: PreTrainedModel) -> Decoder:
    """The names of its parts. Raises UnsupportedError for a family whose parts are not known."""
    parts = family_of(model.config.model_type).decoder
    if parts is None:
        raise UnsupportedError(f"The parts of {model.config.model_type} models are not known to the recipes.")
    return parts


def mlp_of(model: PreTrainedModel) -> Mlp:
    """The names of its MLP's parts. Raises UnsupportedError for a family whose MLP is not known."""
    family = family_of(model.config.model_type)
    if family.mlp is None or family.keys.inner_size is None:
        raise UnsupportedError(f"The MLP of {family.title} models is not known, so that it cannot be pruned.")
    return family.mlp


def _slices(family: ModelFamily, mlp: Mlp) -> list[tuple[str, int]]:
    """The weights that neurons belong to, each with its dimension of neurons. Conv1D's are [inputs, outputs]."""
    outputs, inputs = (1, 0) if family.conv1d else (0, 1)
    rising = [name for name in (mlp.gate, mlp.up) if name]
    return [
        *((f"{name}.weight", outputs) for name in rising),
        *((f"{name}.bias", 0) for name in rising),
        (f"{mlp.down}.weight", inputs),
    ]


def _made(teacher: PreTrainedModel, config: Any, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    student: Any = AutoModelForCausalLM.from_config(config)
    student.load_state_dict(weights)
    made: PreTrainedModel = student.to(teacher.device).eval()
    return made
