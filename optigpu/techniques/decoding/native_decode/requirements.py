"""Why no decoder's program can be filled from a loaded model."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from optigpu.models.families import FAMILIES
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
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose angles do not depend on how long the sequence is."""


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
    reason = _other_architecture(model.config, family)
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


def _other_architecture(config: PreTrainedConfig, family: Runnable) -> str | None:
    """The feature of the configuration that a program cannot express, or None."""
    activation = getattr(config, family.family.keys.activation)
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if getattr(config, "add_cross_attention", False):
        return "blocks with cross-attention"
    if not getattr(config, "do_layer_norm_before", True):
        return "an OPT model with norms after attention and MLP (do_layer_norm_before is false)"
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        return "an embedding that is projected to another width"
    if activation not in ACTIVATIONS:
        return f"the activation {activation}"
    if rotary not in FIXED_ROTARY:
        return f"rotary embeddings of the kind {rotary}, whose angles may depend on the length"
    return None


def _other_shapes(
    model: PreTrainedModel, family: Runnable, decoder: torch.nn.Module, blocks: list[torch.nn.Module]
) -> str | None:
    """The property of the model's parts that a program cannot express, or None."""
    attention: Any = blocks[0].get_submodule(family.attention.path)
    parts = family.decoder
    norms = [block.get_submodule(path) for block in blocks for path in (parts.first, parts.second)]
    if any(getattr(norm, "weight", None) is None for norm in (*norms, getattr(decoder, parts.final))):
        return "needs norms with weights, and some of this model's are missing or have none"
    reason = other_size(model.config.hidden_size, attention.head_dim)
    if reason:
        return reason
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is not None and 2 * rotary.inv_freq.numel() != attention.head_dim:
        return "does not support rotary embeddings of a part of a head"
    rows, outputs = (
        weight_of(layer).shape[0]
        for layer in (getattr(decoder, parts.embedding), model.get_submodule(HEAD_PATH))
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
