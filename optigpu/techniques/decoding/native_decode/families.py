"""Which roles the modules of a transformers decoder play for native_decode. To add a family, add one entry to `ROLES`.

What modules and configurations say themselves (kinds of norms, sizes, biases, angles, windows) is read off them by
programs.py. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from optigpu.models.loading.expressed import ROTATIONS, Fields


@dataclass(frozen=True)
class MixtureRoles:
    """Of the module at a block's `mlp` in the place of an MLP, where it has `experts`: names in it, or None.

    `shared` is an MLP. Of the configuration: `chosen` experts of a token, `normalized` and `scale`; `choice_bias` is
    the router's. `clamp` are the fields of alpha and limit of a gate that is clamped, whose outputs stand in pairs.
    """

    experts: str = "experts"
    router: str = "gate"
    shared: str | None = None
    shared_gate: str | None = None
    chosen: str = "num_experts_per_tok"
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool | str = True
    scale: str | None = None
    choice_bias: str | None = None
    clamp: tuple[str, str] | None = None

    @property
    def fields(self) -> Fields:
        """What it says of a configuration."""
        names = (self.chosen, self.normalized, self.scale, *(self.clamp or ()), *_OF_MIXTURES)
        return {name: None for name in names if isinstance(name, str)}


_OF_MIXTURES = (
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
"""Fields that the modules show, and what changes training alone."""


@dataclass(frozen=True)
class Roles:
    """One family. Names of norms and of attention's and the MLP's paths are from a block, None where there is none.

    `model` and `block` are transformers' classes; `path` leads to the decoder, in which `embedding`, `positions`,
    `blocks` and `final` are. `qkv`, `output`, `query_norm` and `key_norm` are names in `attention`; `gate`, `up` and
    `down` in `mlp`; `gate_up` is one matrix with the gate's outputs first. Norms that a block lacks, because its
    configuration says so, are left out; a parallel block without a second norm has the first one's outputs.

    `one_plus`: norms by 1 + w; `epsilon`: of norms that do not say it themselves. `parallel` is a field of the
    configuration where that decides. `window`: whose `sliding_window` there is. `angles`: the decoder's rotary_emb
    gives each angle for both numbers of a pair, or once; or attention has them stored. `turned_if` is what attention
    says of whether its queries are turned. The fields of the configuration of the other names scale or cap; `fields`
    are further ones that the parts of a loaded model express.
    """

    model: str
    block: str
    path: str = "model"
    embedding: str = "embed_tokens"
    positions: str | None = None
    blocks: str = "layers"
    final: str = "norm"
    first: str | None = "input_layernorm"
    second: str | None = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    query_norm: str | None = None
    key_norm: str | None = None
    mlp: str = "mlp"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None
    activation: str = "hidden_act"
    one_plus: bool = False
    epsilon: float = 1e-5
    by_groups: bool = False
    neighbours: bool = False
    angles: Literal["twice", "once", "stored"] = "twice"
    turned_if: str | None = None
    parallel: bool | str = False
    sinks: str | None = None
    mixture: MixtureRoles | None = None
    window: Literal["config", "attention"] | None = None
    embedding_scale: str | None = None
    residual_scale: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    score_cap: str | None = None
    logit_cap: str | None = None
    fields: Fields = field(default_factory=dict)

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The linear layers of a block by their paths, in the order in which they run; a stage shares its inputs."""
        before = (self.gate_up,) if self.gate_up else (self.gate, self.up)
        return (
            tuple(joined(self.attention, name) for name in self.qkv),
            (joined(self.attention, self.output),),
            tuple(joined(self.mlp, name) for name in before if name),
            (joined(self.mlp, self.down),),
        )


def joined(parent: str, name: str) -> str:
    """A path of two parts, the first of which may be empty."""
    return f"{parent}.{name}" if parent else name


def _like_llama(prefix: str, **differences: Any) -> Roles:
    """Of a family most of whose modules have Llama's names."""
    return Roles(f"{prefix}ForCausalLM", f"{prefix}DecoderLayer", **differences)


_GEMMA: dict[str, Any] = {
    "one_plus": True,
    "fields": {"head_dim": None, "hidden_activation": None, "query_pre_attn_scalar": None},
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "second": "pre_feedforward_layernorm",
    "after_attention": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "activation": "hidden_activation",
    "logit_cap": "final_logit_softcapping",
    "window": "attention",
}
_QK_NORMS: dict[str, Any] = {"query_norm": "q_norm", "key_norm": "k_norm"}
_OLMO2: dict[str, Any] = {
    "first": None,
    "second": None,
    "after_attention": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    **_QK_NORMS,
}
_PLAIN_MLP: dict[str, Any] = {"gate": None, "up": "fc1", "down": "fc2"}
_GRANITE: dict[str, Any] = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
    "fields": {"attention_multiplier": None},
}
_LAYER_NORM: Fields = {"layer_norm_eps": None}
_PARTIAL: Fields = {"rope_parameters.partial_rotary_factor": None}
"""Of families that turn a part of each head."""
_LONG: Fields = {"rope_parameters.rope_type": (*ROTATIONS, "longrope")} | dict.fromkeys(
    ("rope_parameters.short_factor", "rope_parameters.long_factor", "original_max_position_embeddings")
)

ROLES: Mapping[str, Roles] = MappingProxyType(
    {
        "gpt2": Roles(
            *("GPT2LMHeadModel", "GPT2Block", "transformer", "wte", "wpe", "h", "ln_f", "ln_1", "ln_2"),
            attention="attn",
            qkv=("c_attn",),
            output="c_proj",
            gate=None,
            up="c_fc",
            down="c_proj",
            activation="activation_function",
        ),
        "opt": Roles(
            *("OPTForCausalLM", "OPTDecoderLayer", "model.decoder", "embed_tokens", "embed_positions"),
            final="final_layer_norm",
            first="self_attn_layer_norm",
            second="final_layer_norm",
            output="out_proj",
            mlp="",
            **_PLAIN_MLP,
            activation="activation_function",
        ),
        "llama": _like_llama("Llama"),
        "mistral": _like_llama("Mistral", window="config"),
        "ministral": _like_llama("Ministral", window="attention"),
        "qwen2": _like_llama("Qwen2", window="attention"),
        "qwen3": _like_llama("Qwen3", window="attention", **_QK_NORMS),
        "gemma": _like_llama("Gemma", **_GEMMA),
        "gemma2": _like_llama("Gemma2", score_cap="attn_logit_softcapping", **_GEMMA2),
        "gemma3_text": _like_llama("Gemma3", **_QK_NORMS, **_GEMMA2),
        "olmo": _like_llama("Olmo"),
        "olmo2": _like_llama("Olmo2", **_OLMO2),
        "olmo3": _like_llama("Olmo3", window="attention", **_OLMO2),
        "smollm3": _like_llama(
            "SmolLM3",
            window="attention",
            turned_if="use_rope",
            fields={"no_rope_layers": None, "no_rope_layer_interval": None},
        ),
        "phi": _like_llama(
            "Phi",
            final="final_layernorm",
            second=None,
            output="dense",
            query_norm="q_layernorm",
            key_norm="k_layernorm",
            **_PLAIN_MLP,
            parallel=True,
            fields=_LAYER_NORM | _PARTIAL | {"qk_layernorm": None},
        ),
        "phi3": _like_llama(
            "Phi3", qkv=("qkv_proj",), gate_up="gate_up_proj", window="config", fields=_PARTIAL | _LONG
        ),
        "granite": _like_llama("Granite", **_GRANITE),
        "starcoder2": _like_llama(
            "Starcoder2",
            gate=None,
            up="c_fc",
            down="c_proj",
            window="config",
            fields={"norm_epsilon": None, "use_bias": None},
        ),
        "stablelm": _like_llama(
            "StableLm",
            query_norm="q_layernorm",
            key_norm="k_layernorm",
            parallel="use_parallel_residual",
            fields=_LAYER_NORM | _PARTIAL | {"use_qkv_bias": None, "qk_layernorm": None},
        ),
        "gpt_neox": Roles(
            *("GPTNeoXForCausalLM", "GPTNeoXLayer", "gpt_neox", "embed_in"),
            final="final_layer_norm",
            attention="attention",
            qkv=("query_key_value",),
            output="dense",
            gate=None,
            up="dense_h_to_4h",
            down="dense_4h_to_h",
            by_groups=True,
            parallel="use_parallel_residual",
            fields=_LAYER_NORM | _PARTIAL,
        ),
        "gptj": Roles(
            *("GPTJForCausalLM", "GPTJBlock", "transformer", "wte", None, "h", "ln_f", "ln_1", None),
            attention="attn",
            output="out_proj",
            gate=None,
            up="fc_in",
            down="fc_out",
            activation="activation_function",
            neighbours=True,
            angles="stored",
            parallel=True,
            fields={"rotary_dim": None},
        ),
        "cohere": _like_llama(
            "Cohere",
            second=None,
            **_QK_NORMS,
            neighbours=True,
            parallel=True,
            logit_scale="logit_scale",
            fields=_LAYER_NORM | {"use_qk_norm": None},
        ),
        "cohere2": _like_llama(
            "Cohere2",
            second=None,
            neighbours=True,
            parallel=True,
            window="attention",
            turned_if="sliding_window",
            logit_scale="logit_scale",
            fields=_LAYER_NORM,
        ),
        "mixtral": _like_llama("Mixtral", window="config", mixture=MixtureRoles()),
        "qwen2_moe": _like_llama(
            "Qwen2Moe",
            window="attention",
            mixture=MixtureRoles(
                shared="shared_expert", shared_gate="shared_expert_gate", normalized="norm_topk_prob"
            ),
            fields={"qkv_bias": None},
        ),
        "qwen3_moe": _like_llama(
            "Qwen3Moe", window="config", **_QK_NORMS, mixture=MixtureRoles(normalized="norm_topk_prob")
        ),
        "olmoe": _like_llama("Olmoe", **_QK_NORMS, mixture=MixtureRoles(normalized="norm_topk_prob")),
        "granitemoe": _like_llama(
            "GraniteMoe", mlp="block_sparse_moe", **_GRANITE, mixture=MixtureRoles(router="router")
        ),
        "glm4_moe": _like_llama(
            "Glm4Moe",
            **_QK_NORMS,
            mixture=MixtureRoles(
                shared="shared_experts",
                score="sigmoid",
                normalized="norm_topk_prob",
                scale="routed_scaling_factor",
                choice_bias="e_score_correction_bias",
            ),
            fields=_PARTIAL | {"use_qk_norm": None},
        ),
        "gpt_oss": _like_llama(
            "GptOss",
            window="attention",
            sinks="sinks",
            angles="once",
            mixture=MixtureRoles(router="router", clamp=("swiglu_alpha", "swiglu_limit")),
        ),
        "nemotron": _like_llama("Nemotron", gate=None, one_plus=True, fields=_PARTIAL | {"norm_eps": None}),
    }
)
"""By transformers' model_type."""
