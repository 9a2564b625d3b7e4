"""Why no decoder's program can be filled from a loaded model."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from optigpu.models.families import FAMILIES
from optigpu.models.loading.expressed import DECODER, Fields, unexpressed
from optigpu.ops.decode.program import Activation
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.decoding.native_decode.limits import LEAVE_OUT, Runnable, other_size, runnable

HEAD_PATH = "lm_head"
"""The path of the head in every causal language model."""
ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"
    ),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
}
"""By transformers' names, of which it has several for one function."""
EXPRESSED: Fields = DECODER | dict.fromkeys(("hidden_act", "activation_function"), tuple(ACTIVATIONS))
"""What a program has of a configuration."""


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether head and embedding share a matrix, as long as nothing is packed."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def refusal(model: PreTrainedModel) -> str | None:
    """Why no program can be filled from a loaded model, as `known_refusal`; nothing is changed.

    What `checked_places` looks at, the linear layers' weights and inputs, is not looked at again.
    """
    family = runnable(model.config.model_type)
    if family is None or type(model).__name__ != family.decoder.model:
        kinds = ", ".join(known.decoder.model for name in FAMILIES if (known := runnable(name)))
        return f"supports {kinds}, not {type(model).__name__}; {LEAVE_OUT}"
    reason = unexpressed(model.config, EXPRESSED)
    if reason:
        return f"does not support {reason}; {LEAVE_OUT}"
    decoder = model.get_submodule(family.decoder.path)
    blocks: list[torch.nn.Module] = list(getattr(decoder, family.decoder.blocks))
    changed = {type(block).__name__ for block in blocks} - {family.decoder.block}
    paths = {place.path for place in linear_places(model)} ^ set(_linear_paths(family, len(blocks)))
    if changed or paths:
        strange = ", ".join(sorted(changed or paths)[:3])
        return f"needs the blocks of transformers' {family.decoder.model}, and {strange} differs; {LEAVE_OUT}"
    reason = _other_shapes(model, family, decoder, blocks)
    return f"{reason}; {LEAVE_OUT}" if reason else _damage(model)


def _other_shapes(
    model: PreTrainedModel, family: Runnable, decoder: torch.nn.Module, blocks: list[torch.nn.Module]
) -> str | None:
    """The property of the model's parts that a program cannot express, or None."""
    attention: Any = blocks[0].get_submodule(family.attention.path)
    reason = other_size(model.config.hidden_size, attention.head_dim)
    if reason:
        return reason
    rows, outputs = (
        weight_of(layer).shape[0]
        for layer in (getattr(decoder, family.decoder.embedding), model.get_submodule(HEAD_PATH))
    )
    if rows != outputs:
        return f"needs a head with as many outputs as the embedding has rows; this model has {outputs} and {rows}"
    return None


def _damage(model: PreTrainedModel) -> str | None:
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"needs finite weights, and {name} has some that are NaN or infinite; the model's files are damaged"
    return None


def _linear_paths(family: Runnable, blocks: int) -> Iterator[str]:
    yield HEAD_PATH
    for index in range(blocks):
        yield from (
            f"{family.decoder.path}.{family.decoder.blocks}.{index}.{path}" for path in family.linears
        )
