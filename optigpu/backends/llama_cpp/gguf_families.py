"""Which families of transformers are written as GGUF, and how llama.cpp has each. Imports no torch.

To add a family, add one entry to `WRITTEN_FAMILIES`. Names of tensors come from the package gguf; an entry has the
rest: which numbers of the configuration a file holds, what lies otherwise there, and what llama.cpp does not compute.
`tests/engine/test_gguf_families.py` compares the logits of every entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from optigpu.models.loading.expressed import ROTATION, SIZES, Condition, Fields
from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SILU = ("silu", "swish")
GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""llama.cpp computes GELU by its tanh."""
LAYER_NORM, RMS_NORM = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"


@dataclass(frozen=True)
class WrittenFamily:
    """How llama.cpp has a family of transformers' model_type.

    `architecture` is its name there. `norm` is the key of its norms' epsilon, and `epsilon` the configuration's field
    or the number. `numbers` are the configuration's fields by further keys of a file. `activations` are those that the
    architecture computes, and `expressed` further fields of the configuration that a file expresses.

    `rotates_neighbours`: rows of a head's queries and keys that lie as halves in transformers lie as neighbours in a
    file. `joined_by_head`: transformers has queries, keys and values of one head beside each other. `one_less`: the
    weights of norms are stored less one in transformers. `head`: whether a head of its own is possible, must be there,
    or cannot be. `windows`: it has layers with sliding windows; without, the context ends with the window.
    `long_factors`: it reads a divisor for each frequency. `rotates_part`: it rotates a part of a head, if asked to.
    `wide_heads`: heads may be of another size than hidden size / heads. `inputs_first`: transformers has experts as
    [experts, inputs, outputs], with outputs of gate and up by turns.
    """

    architecture: str
    norm: str = RMS_NORM
    epsilon: str | float = "rms_norm_eps"
    numbers: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = SILU
    expressed: Fields | None = None
    rotates_neighbours: bool = False
    joined_by_head: bool = False
    one_less: bool = False
    head: Literal["possible", "needed", "never"] = "possible"
    windows: bool = False
    long_factors: bool = False
    rotates_part: bool = False
    wide_heads: bool = False
    inputs_first: bool = False

    @property
    def fields(self) -> Fields:
        """What a file of this family says of a configuration, and what llama.cpp computes without being told."""
        found: Fields = {**_COMMON, **dict.fromkeys(self.numbers.values())}
        found |= dict.fromkeys(
            ("hidden_act", "hidden_activation", "activation_function", "activation"), self.activations
        )
        if isinstance(self.epsilon, str):
            found[self.epsilon] = None
        if not self.long_factors:
            found["rope_parameters.rope_type"] = ("default", "linear", "yarn")
        if not self.rotates_part:
            found["rope_parameters.partial_rotary_factor"] = (None, 1.0)
        if not self.wide_heads:
            found["head_dim"] = _USUAL_HEADS
        if self.head == "never":
            found["tie_word_embeddings"] = (True,)
        return found | (self.expressed or {})


def _has_usual_heads(config: "PretrainedConfig") -> bool:
    size = getattr(config, "head_dim", None)
    return size is None or bool(size * config.num_attention_heads == config.hidden_size)


_USUAL_HEADS = Condition("hidden_size / num_attention_heads", _has_usual_heads)
_SCALED_BY_HEAD_SIZE = Condition(
    "head_dim", lambda config: bool(config.query_pre_attn_scalar == config.head_dim)
)
_AS_MANY = Condition(
    "num_attention_heads", lambda config: bool(config.num_key_value_heads == config.num_attention_heads)
)


def _each_fourth_alone_is_not_rotated(config: "PretrainedConfig") -> bool:
    return all(bool(each) == bool(layer % 4) for layer, each in enumerate(config.no_rope_layers, 1))


def _each_second_alone_is_full(config: "PretrainedConfig") -> bool:
    return all((each == "full_attention") == bool(layer % 2) for layer, each in enumerate(config.layer_types))


_COMMON: Fields = {
    **SIZES,
    **ROTATION,
    # What is not among these the library derives from the factor.
    **dict.fromkeys(
        ("rope_parameters.attention_factor", "rope_parameters.mscale", "rope_parameters.mscale_all_dim"),
        (None,),
    ),
    "rope_parameters.truncate": (None, True),
    "rope_parameters.partial_rotary_factor": None,
    "rope_parameters.rope_type": ("default", "linear", "llama3", "yarn"),
    **dict.fromkeys(("attention_bias", "mlp_bias", "sliding_window", "multi_query")),
    "layer_types": (None, "full_attention", "sliding_attention"),
    "rope_parameters.full_attention": None,
    "rope_parameters.sliding_attention": None,
    # The same products in another order.
    "reorder_and_upcast_attn": None,
}
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_NORMED_EXPERTS: Fields = {
    "norm_topk_prob": (True,),
    "mlp_only_layers": Condition("[]", lambda config: not config.mlp_only_layers),
    "decoder_sparse_step": (1,),
}
_NO_BIAS: Fields = {"attention_bias": (False,)}
_LLAMA: dict[str, Any] = {"rotates_neighbours": True, "long_factors": True}
_GEMMA: dict[str, Any] = {"activations": GELU, "one_less": True, "wide_heads": True}
_GEMMA2 = {"query_pre_attn_scalar": _SCALED_BY_HEAD_SIZE} | _NO_BIAS
_LAYER_NORM = LAYER_NORM, "layer_norm_eps"

WRITTEN_FAMILIES: Mapping[str, WrittenFamily] = MappingProxyType(
    {
        "llama": WrittenFamily("llama", **_LLAMA, wide_heads=True),
        "mistral": WrittenFamily("llama", **_LLAMA, wide_heads=True),
        "mixtral": WrittenFamily("llama", **_LLAMA, wide_heads=True, numbers=_EXPERTS),
        "qwen2": WrittenFamily("qwen2"),
        "qwen3": WrittenFamily("qwen3", wide_heads=True),
        "qwen3_moe": WrittenFamily(
            "qwen3moe",
            wide_heads=True,
            numbers=_EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
            expressed=_NORMED_EXPERTS | _NO_BIAS,
        ),
        "gemma": WrittenFamily("gemma", **_GEMMA, head="never", expressed=_NO_BIAS),
        "gemma2": WrittenFamily(
            "gemma2",
            **_GEMMA,
            head="never",
            windows=True,
            numbers={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            expressed=_GEMMA2,
        ),
        "gemma3_text": WrittenFamily(
            "gemma3",
            **_GEMMA,
            windows=True,
            numbers={"final_logit_softcapping": "final_logit_softcapping"},
            expressed=_GEMMA2 | {"attn_logit_softcapping": (None,), "_sliding_window_pattern": None},
        ),
        "phi3": WrittenFamily(
            "phi3", rotates_part=True, expressed={"original_max_position_embeddings": None}
        ),
        "phi": WrittenFamily(
            "phi2",
            *_LAYER_NORM,
            activations=GELU,
            head="needed",
            rotates_part=True,
            expressed={"qk_layernorm": (False,)},
        ),
        "olmo": WrittenFamily(
            "olmo",
            LAYER_NORM,
            1e-5,
            rotates_neighbours=True,
            numbers={"attention.clamp_kqv": "clip_qkv"},
            expressed=_NO_BIAS,
        ),
        "olmo2": WrittenFamily("olmo2", head="needed", expressed=_NO_BIAS),
        "olmo3": WrittenFamily("olmo2", head="needed", windows=True, expressed=_NO_BIAS),
        "olmoe": WrittenFamily(
            "olmoe",
            head="needed",
            numbers=_EXPERTS | {"expert_count": "num_experts"},
            expressed=_NO_BIAS
            | {"norm_topk_prob": (False,), "clip_qkv": (None,), "num_key_value_heads": _AS_MANY},
        ),
        "gpt_oss": WrittenFamily(
            "gpt-oss",
            wide_heads=True,
            head="needed",
            windows=True,
            inputs_first=True,
            numbers=_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
            expressed={
                "attention_bias": (True,),
                "layer_types": Condition("every second layer without a window", _each_second_alone_is_full),
                "swiglu_alpha": (1.702,),
                "swiglu_limit": (7.0,),
            },
        ),
        "granite": WrittenFamily(
            "granite",
            **_LLAMA,
            numbers={
                "logit_scale": "logits_scaling",
                "residual_scale": "residual_multiplier",
                "embedding_scale": "embedding_multiplier",
                "attention.scale": "attention_multiplier",
            },
        ),
        "smollm3": WrittenFamily(
            "smollm3",
            rotates_neighbours=True,
            expressed={
                "no_rope_layers": Condition("every fourth layer", _each_fourth_alone_is_not_rotated),
                "no_rope_layer_interval": (4,),
            },
        ),
        "ernie4_5": WrittenFamily("ernie4_5", wide_heads=True, expressed={"use_bias": (False,)}),
        "cohere": WrittenFamily(
            "command-r",
            *_LAYER_NORM,
            head="never",
            numbers={"logit_scale": "logit_scale"},
            expressed=_NO_BIAS | {"use_qk_norm": (False,)},
        ),
        "cohere2": WrittenFamily(
            "cohere2",
            *_LAYER_NORM,
            head="never",
            windows=True,
            numbers={"logit_scale": "logit_scale"},
            expressed=_NO_BIAS,
        ),
        "nemotron": WrittenFamily(
            "nemotron",
            LAYER_NORM,
            "norm_eps",
            activations=("relu2",),
            one_less=True,
            head="needed",
            rotates_part=True,
        ),
        "starcoder2": WrittenFamily(
            "starcoder2", LAYER_NORM, "norm_epsilon", activations=GELU, expressed={"use_bias": (True,)}
        ),
        "stablelm": WrittenFamily(
            "stablelm",
            *_LAYER_NORM,
            head="needed",
            rotates_part=True,
            expressed={"use_qkv_bias": None, "use_parallel_residual": None, "qk_layernorm": (False,)},
        ),
        "gpt_neox": WrittenFamily(
            "gptneox",
            *_LAYER_NORM,
            activations=(*GELU, "gelu"),
            joined_by_head=True,
            rotates_part=True,
            head="needed",
            numbers={"use_parallel_residual": "use_parallel_residual"},
            expressed={"attention_bias": (True,)},
        ),
        "gpt2": WrittenFamily("gpt2", LAYER_NORM, "layer_norm_epsilon", activations=GELU),
        "gpt_bigcode": WrittenFamily(
            "starcoder",
            LAYER_NORM,
            "layer_norm_epsilon",
            activations=GELU,
            expressed={"multi_query": (True,)},
        ),
        "bloom": WrittenFamily(
            "bloom",
            LAYER_NORM,
            "layer_norm_epsilon",
            joined_by_head=True,
            expressed={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": None},
        ),
    }
)
"""By transformers' model_type."""


def written_family(name: str) -> WrittenFamily:
    """The entry of that model_type. Raises UnsupportedError for one that is not written."""
    if name in WRITTEN_FAMILIES:
        return WRITTEN_FAMILIES[name]
    raise UnsupportedError(
        f"{name} models cannot be written as GGUF here, only {', '.join(WRITTEN_FAMILIES)}; ask for the backend torch, "
        "or name a GGUF file of the model."
    )


def family_of_architecture(name: str) -> str:
    """transformers' model_type of an architecture of llama.cpp, or llama.cpp's own name of one that is not written."""
    return next((each for each, family in WRITTEN_FAMILIES.items() if family.architecture == name), name)
