"""The families of transformers models of which techniques replace parts. Imports no torch.

To add a family, add one entry to `FAMILIES`. Techniques refuse a family of which a part that they need is None. What
`native_decode` and GGUF files need of a family is in native_decode/families.py and llama_cpp/gguf_families.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

NormKind = Literal["LayerNorm", "RMSNorm"]
Forwards = Literal["gpt2", "opt", "llama", "vit"]
"""Whose `forward` functions a family's blocks and attentions have, by the family that had them first."""


@dataclass(frozen=True)
class Decoder:
    """The parts of a causal language model: `model`, `block` and `norm` are transformers' classes.

    `path` leads from the model to the decoder; `embedding`, `positions` (None: none are learned), `blocks` and `final`
    are names in it. `first` and `second` are a block's norms before its attention and before its MLP.
    """

    model: str
    path: str
    embedding: str
    positions: str | None
    blocks: str
    final: str
    block: str
    norm: str
    norm_kind: NormKind
    first: str
    second: str


@dataclass(frozen=True)
class AttentionParts:
    """A block's attention: transformers' class, its path from the block, and its linear layers by their names in it.

    `qkv` is one layer where all three are one matrix. `window_in` says whose `sliding_window` it passes on, if any.
    """

    kind: str
    path: str
    qkv: tuple[str, ...]
    output: str
    window_in: Literal["config", "attention"] | None = None


@dataclass(frozen=True)
class Mlp:
    """A block's MLP: the class and the path of the module that holds it, and names there; `gate` None: not gated."""

    kind: str
    path: str
    up: str
    down: str
    activation: str
    gate: str | None = None


@dataclass(frozen=True)
class ConfigKeys:
    """What the family's configuration calls the width of the MLP (None: not known) and its activation."""

    inner_size: str | None = None
    activation: str = "hidden_act"


@dataclass(frozen=True)
class Passes:
    """What forward passes hold at once: tensors as wide as the MLP's inner layer, eager attention's scores in
    float32."""

    rotary: bool = True
    inner_tensors: int = 3
    float_scores: bool = True


@dataclass(frozen=True)
class ModelFamily:
    """One family. `name` is transformers' model_type, `title` what people call it. What is None is not known.

    `mlps` are the classes under which versions of transformers have its MLP, the newest first. `conv1d`: its linear
    layers are transformers' Conv1D, whose weights are [inputs, outputs]. `needs_mask`: a decode step over a static
    cache needs an attention mask. `fixed_image_size`: an image classifier with an embedding for each place.
    `gptqmodel_activation` is the only activation with which GPTQModel's AWQ scales it correctly, None for any.
    """

    name: str
    title: str
    forwards: Forwards | None = None
    decoder: Decoder | None = None
    attention: AttentionParts | None = None
    mlps: tuple[Mlp, ...] = ()
    keys: ConfigKeys = ConfigKeys()
    conv1d: bool = False
    needs_mask: bool = False
    fixed_image_size: bool = False
    gptqmodel_activation: str | None = None
    passes: Passes | None = None

    @property
    def mlp(self) -> Mlp | None:
        return self.mlps[0] if self.mlps else None

    @property
    def learns_positions(self) -> bool:
        return self.decoder is not None and self.decoder.positions is not None


_SEPARATE_QKV = ("q_proj", "k_proj", "v_proj")


def _like_llama(
    name: str,
    prefix: str,
    window_in: Literal["config", "attention"] | None = None,
) -> ModelFamily:
    """A family whose classes differ from Llama's by the first part of their names alone."""
    return replace(
        _blocks_like_llama(name, prefix, prefix),
        attention=AttentionParts(f"{prefix}Attention", "self_attn", _SEPARATE_QKV, "o_proj", window_in),
        mlps=(Mlp(f"{prefix}MLP", "mlp", "up_proj", "down_proj", "act_fn", gate="gate_proj"),),
        keys=ConfigKeys(inner_size="intermediate_size"),
    )


def _blocks_like_llama(name: str, title: str, prefix: str, inner_tensors: int = 3) -> ModelFamily:
    """A family whose blocks and norms have Llama's names, with another attention or MLP."""
    decoder = Decoder(
        model=f"{prefix}ForCausalLM",
        path="model",
        embedding="embed_tokens",
        positions=None,
        blocks="layers",
        final="norm",
        block=f"{prefix}DecoderLayer",
        norm=f"{prefix}RMSNorm",
        norm_kind="RMSNorm",
        first="input_layernorm",
        second="post_attention_layernorm",
    )
    return ModelFamily(name, title, "llama", decoder, passes=Passes(inner_tensors=inner_tensors))


_GPT2 = ModelFamily(
    "gpt2",
    "GPT-2",
    forwards="gpt2",
    decoder=Decoder(
        model="GPT2LMHeadModel",
        path="transformer",
        embedding="wte",
        positions="wpe",
        blocks="h",
        final="ln_f",
        block="GPT2Block",
        norm="LayerNorm",
        norm_kind="LayerNorm",
        first="ln_1",
        second="ln_2",
    ),
    attention=AttentionParts("GPT2Attention", "attn", ("c_attn",), "c_proj"),
    mlps=(Mlp("GPT2MLP", "mlp", "c_fc", "c_proj", "act"),),
    keys=ConfigKeys(inner_size="n_inner", activation="activation_function"),
    conv1d=True,
    passes=Passes(rotary=False, inner_tensors=4, float_scores=False),
)
_OPT = ModelFamily(
    "opt",
    "OPT",
    forwards="opt",
    decoder=Decoder(
        model="OPTForCausalLM",
        path="model.decoder",
        embedding="embed_tokens",
        positions="embed_positions",
        blocks="layers",
        final="final_layer_norm",
        block="OPTDecoderLayer",
        norm="LayerNorm",
        norm_kind="LayerNorm",
        first="self_attn_layer_norm",
        second="final_layer_norm",
    ),
    attention=AttentionParts("OPTAttention", "self_attn", _SEPARATE_QKV, "out_proj"),
    # The block itself holds its MLP's layers.
    mlps=(Mlp("OPTDecoderLayer", "", "fc1", "fc2", "activation_fn"),),
    keys=ConfigKeys(inner_size="ffn_dim", activation="activation_function"),
    needs_mask=True,
    gptqmodel_activation="relu",
    passes=Passes(rotary=False, inner_tensors=2, float_scores=False),
)
_GPTJ = ModelFamily(
    # Its blocks have one norm before attention and MLP, which take the same inputs: no other family's parts fit.
    "gptj",
    "GPT-J",
    mlps=(Mlp("GPTJMLP", "mlp", "fc_in", "fc_out", "act"),),
    keys=ConfigKeys(inner_size="n_inner", activation="activation_function"),
    passes=Passes(inner_tensors=4),
)
_VIT = ModelFamily(
    "vit",
    "ViT",
    forwards="vit",
    attention=AttentionParts("ViTAttention", "attention", _SEPARATE_QKV, "o_proj"),
    mlps=(
        Mlp("ViTMLP", "mlp", "fc1", "fc2", "activation_fn"),
        Mlp("ViTIntermediate", "intermediate", "dense", "", "intermediate_act_fn"),
    ),
    fixed_image_size=True,
)

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            _GPT2,
            _GPTJ,
            _OPT,
            _like_llama("llama", "Llama"),
            _like_llama("mistral", "Mistral", window_in="config"),
            _like_llama("qwen2", "Qwen2", window_in="attention"),
            _blocks_like_llama("phi3", "Phi-3", "Phi3", inner_tensors=4),
            _blocks_like_llama("qwen3", "Qwen3", "Qwen3"),
            _blocks_like_llama("smollm3", "SmolLM3", "SmolLM3"),
            _VIT,
            ModelFamily("beit", "BEiT", fixed_image_size=True),
            ModelFamily("deit", "DeiT", fixed_image_size=True),
        )
    }
)
"""By transformers' model_type."""


def family_of(name: str) -> ModelFamily:
    """The family of that model_type; one without known parts if the table has none."""
    return FAMILIES.get(name) or ModelFamily(name, name)
