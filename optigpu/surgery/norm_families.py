"""The decoder families whose blocks `blocks.py` can rewrite, and why a model is none of them."""

from dataclasses import dataclass
from typing import Any, Literal

from optigpu.documents.result import Environment
from optigpu.models.facts import ModelFacts
from optigpu.vocabulary import DeviceKind, UnsupportedError

NormKind = Literal["LayerNorm", "RMSNorm"]


@dataclass(frozen=True)
class Family:
    """Where the blocks and norms of a family's causal language models stand, as paths from the model.

    `block` is the class of transformers that is rewritten, `norm` that of the norms, `first` a block's name for the
    norm before its attention.
    """

    kind: NormKind
    block: str
    norm: str
    blocks: str = "model.layers"
    first: str = "input_layernorm"
    final: str = "model.norm"


def _like_llama(name: str) -> Family:
    return Family("RMSNorm", f"{name}DecoderLayer", f"{name}RMSNorm")


FAMILIES = {
    "gpt2": Family("LayerNorm", "GPT2Block", "LayerNorm", "transformer.h", "ln_1", "transformer.ln_f"),
    "opt": Family(
        "LayerNorm",
        "OPTDecoderLayer",
        "LayerNorm",
        "model.decoder.layers",
        "self_attn_layer_norm",
        "model.decoder.final_layer_norm",
    ),
    "llama": _like_llama("Llama"),
    "mistral": _like_llama("Mistral"),
    "phi3": _like_llama("Phi3"),
    "qwen2": _like_llama("Qwen2"),
    "qwen3": _like_llama("Qwen3"),
    "smollm3": _like_llama("SmolLM3"),
}
"""By transformers' model_type."""
TECHNIQUES: dict[NormKind, str] = {"LayerNorm": "fused_layernorm", "RMSNorm": "fused_rmsnorm"}
"""What fuses each kind of norm."""
CONFLICTS = {
    "cpu_offload": "a block reads the weights of the next one's norm, which are not on the GPU yet",
    "grad_enabled": "the fused norms have no gradient",
}
"""What cannot be in a stack with rewritten blocks."""


def norm_reason(
    kind: NormKind, environment: Environment, device: DeviceKind, model: ModelFacts | None
) -> str | None:
    """Why norms of one kind cannot be fused on this machine or in that model, in one sentence, or None."""
    if device is DeviceKind.CPU and environment.compiler is None:
        return f"{TECHNIQUES[kind]} is a C++ operator on a CPU and there is no compiler; install g++."
    return _family_reason(kind, model.family) if model else None


def checked_blocks(model: Any, kind: NormKind) -> tuple[Family, Any, Any]:
    """The family, its list of blocks and its final norm, None where a model has none.

    Raises UnsupportedError for a model whose blocks are not known, have norms of the other kind, or are not those of
    transformers any more.
    """
    config, technique = model.config, TECHNIQUES[kind]
    reason = _family_reason(kind, config.model_type) or _variant_reason(config, technique)
    if reason:
        raise UnsupportedError(reason)
    family = FAMILIES[config.model_type]
    parent, _, name = family.final.rpartition(".")
    try:
        blocks, final = model.get_submodule(family.blocks), getattr(model.get_submodule(parent), name)
    except AttributeError as error:
        raise UnsupportedError(
            f"{technique} knows {config.model_type} as a causal language model, and this is a "
            f"{type(model).__name__}; leave it out of the stack."
        ) from error
    changed = {type(block).__name__ for block in blocks} - {family.block}
    if changed:
        raise UnsupportedError(
            f"{technique}: the blocks of this model are {', '.join(sorted(changed))} and no {family.block} any more; "
            "leave out what changed them."
        )
    return family, blocks, final


def require_kernel(kind: NormKind, device: Any, backend: str) -> None:
    """Raises UnsupportedError where norms are plain torch: that would be measured as what it is not."""
    from optigpu.ops.norm.fused_norm import native_norm_reason

    if backend != "torch":
        return
    why = "Triton is missing: install it (pip install triton)."
    raise UnsupportedError(
        f"{TECHNIQUES[kind]} has no kernel here. {native_norm_reason() if device.type == 'cpu' else why}"
    )


def _family_reason(kind: NormKind, name: str) -> str | None:
    technique, family = TECHNIQUES[kind], FAMILIES.get(name)
    if family is None:
        known = ", ".join(other for other, its in FAMILIES.items() if its.kind == kind)
        return f"{technique} knows the blocks of {known}, and not those of {name}; leave it out of the stack."
    if family.kind != kind:
        return f"{technique}: {name} models have no {kind}; take {TECHNIQUES[family.kind]} instead."
    return None


def _variant_reason(config: Any, technique: str) -> str | None:
    """Why a model of a known family has other blocks than its siblings, or None."""
    if config.model_type == "opt" and not config.do_layer_norm_before:
        return (
            f"{technique}: this OPT model norms after its additions and not before (do_layer_norm_before is false); "
            "leave it out of the stack."
        )
    if getattr(config, "add_cross_attention", False):
        return f"{technique} does not know blocks with cross-attention; leave it out of the stack."
    return None
