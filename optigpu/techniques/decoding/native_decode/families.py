"""The families of models that a decoder's program can be filled from, and why a model is none of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optigpu.models.facts import ModelFacts
from optigpu.ops.decode.program import MOST_HEAD_SIZE, Activation
from optigpu.surgery.places import linear_places, weight_of


@dataclass(frozen=True)
class Family:
    """Where the parts of a family's causal language model stand.

    `decoder` is a path from the model, `embedding` to `final` are names in the decoder, and the others paths from a
    block. `block` is the class of transformers of a block, `activation` what the configuration calls the MLP's.
    """

    model: str
    decoder: str
    embedding: str
    positions: str | None
    blocks: str
    final: str
    block: str
    first: str
    attention: str
    qkv: tuple[str, ...]
    output: str
    second: str
    gate: str | None
    up: str
    down: str
    activation: str

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers of a block."""
        gate = (self.gate,) if self.gate else ()
        return (*self.qkv, self.output, *gate, self.up, self.down)


def _projections(attention: str) -> tuple[str, ...]:
    return tuple(f"{attention}.{name}_proj" for name in "qkv")


def _like_llama(name: str) -> Family:
    return Family(
        model=f"{name}ForCausalLM",
        decoder="model",
        embedding="embed_tokens",
        positions=None,
        blocks="layers",
        final="norm",
        block=f"{name}DecoderLayer",
        first="input_layernorm",
        attention="self_attn",
        qkv=_projections("self_attn"),
        output="self_attn.o_proj",
        second="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        activation="hidden_act",
    )


FAMILIES = {
    "gpt2": Family(
        model="GPT2LMHeadModel",
        decoder="transformer",
        embedding="wte",
        positions="wpe",
        blocks="h",
        final="ln_f",
        block="GPT2Block",
        first="ln_1",
        attention="attn",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        second="ln_2",
        gate=None,
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation="activation_function",
    ),
    "opt": Family(
        model="OPTForCausalLM",
        decoder="model.decoder",
        embedding="embed_tokens",
        positions="embed_positions",
        blocks="layers",
        final="final_layer_norm",
        block="OPTDecoderLayer",
        first="self_attn_layer_norm",
        attention="self_attn",
        qkv=_projections("self_attn"),
        output="self_attn.out_proj",
        second="final_layer_norm",
        gate=None,
        up="fc1",
        down="fc2",
        activation="activation_function",
    ),
    "llama": _like_llama("Llama"),
    "mistral": _like_llama("Mistral"),
    "qwen2": _like_llama("Qwen2"),
}
"""By transformers' model_type."""
HEAD = "lm_head"
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


def known_refusal(model: ModelFacts, group: int) -> str | None:
    """Why no program can be filled from a model, as far as its facts say, in one sentence without an end; or None.

    `group` is what the inputs of every matrix must be a multiple of.
    """
    if model.family not in FAMILIES:
        return f"its operator runs {', '.join(FAMILIES)}, and not {model.family}; leave it out of the stack"
    if model.embedding_size != model.hidden_size:
        return "its operator does not project an embedding to another width; leave it out of the stack"
    if model.hidden_size % 16:
        return f"its operator norms rows by sixteens, and {model.hidden_size} are none; leave it out of the stack"
    if _other_head(model.head_size):
        return f"{_other_head(model.head_size)}; leave it out of the stack"
    inputs = {model.hidden_size, model.heads * model.head_size, model.inner_size or model.hidden_size}
    wrong = [number for number in sorted(inputs) if number % group]
    if wrong:
        return (
            f"the model has layers with {wrong[0]} inputs, which groups of {group} do not divide; take another group "
            "or leave it out"
        )
    return None


def refusal(model: Any) -> str | None:
    """Why no program can be filled from a loaded model of a known family, as `known_refusal`; nothing is changed.

    What `checked_places` looks at, the linear layers' weights and inputs, is not looked at again.
    """
    config, family = model.config, FAMILIES.get(model.config.model_type)
    if family is None or type(model).__name__ != family.model:
        kinds = ", ".join(known.model for known in FAMILIES.values())
        return f"its operator runs {kinds}, and this is a {type(model).__name__}; leave it out of the stack"
    reason = _other_architecture(config, family)
    if reason:
        return f"its operator does not run {reason}; leave it out of the stack"
    decoder = model.get_submodule(family.decoder)
    blocks = getattr(decoder, family.blocks)
    changed = {type(block).__name__ for block in blocks} - {family.block}
    paths = {place.path for place in linear_places(model)} ^ set(_linear_paths(family, len(blocks)))
    if changed or paths:
        strange = ", ".join(sorted(changed or paths)[:3])
        return (
            f"its operator knows the blocks of transformers' {family.model}, and not {strange}; leave it out"
        )
    reason = _other_shapes(model, family, decoder, blocks)
    return f"{reason}; leave it out of the stack" if reason else _damage(model)


def _other_head(size: int) -> str | None:
    if size % 4 == 0 and size <= MOST_HEAD_SIZE:
        return None
    return f"its operator takes heads of fours and at most {MOST_HEAD_SIZE} numbers, and this model's have {size}"


def _other_architecture(config: Any, family: Family) -> str | None:
    """What the configuration asks for that a program cannot say, or None."""
    activation = getattr(config, family.activation)
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if getattr(config, "add_cross_attention", False):
        return "blocks with cross-attention"
    if not getattr(config, "do_layer_norm_before", True):
        return "an OPT model that norms after its additions and not before (do_layer_norm_before is false)"
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        return "a model that projects its embedding to another width"
    if activation not in ACTIVATIONS:
        return f"the activation {activation}"
    if rotary not in FIXED_ROTARY:
        return f"rotary embeddings of the kind {rotary}, whose angles may depend on the length"
    return None


def _other_shapes(model: Any, family: Family, decoder: Any, blocks: Any) -> str | None:
    """What of the model's parts a program cannot say, or None."""
    size = blocks[0].get_submodule(family.attention).head_dim
    norms = [block.get_submodule(path) for block in blocks for path in (family.first, family.second)]
    if any(getattr(norm, "weight", None) is None for norm in (*norms, getattr(decoder, family.final))):
        return "its operator does not run a model whose norms are missing or have no weights"
    if model.config.hidden_size % 16:
        return f"its operator norms rows by sixteens, and {model.config.hidden_size} are none"
    if _other_head(size):
        return _other_head(size)
    if hasattr(decoder, "rotary_emb") and 2 * decoder.rotary_emb.inv_freq.numel() != size:
        return "its operator does not run rotary embeddings of a part of a head"
    rows, outputs = (
        weight_of(layer).shape[0] for layer in (getattr(decoder, family.embedding), model.get_submodule(HEAD))
    )
    if rows != outputs:
        return f"the embedding has {rows} rows and the head {outputs} outputs"
    return None


def _damage(model: Any) -> str | None:
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the weights of {name} are not all finite numbers; the model's files are damaged"
    return None


def _linear_paths(family: Family, blocks: int) -> Iterator[str]:
    yield HEAD
    for index in range(blocks):
        yield from (f"{family.decoder}.{family.blocks}.{index}.{path}" for path in family.linears)
