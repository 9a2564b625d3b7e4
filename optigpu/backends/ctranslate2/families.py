"""Which families CTranslate2 computes as transformers does, and which fields of their configurations it expresses.

It ignores others without a word: the epsilon of GPT-2's and Gemma 3's norms, the scale of GPT-2's attention, the angles
of llama3, the base of Gemma's. With a window it computes a prompt wrongly that is longer than the window.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from optigpu.models.loading.expressed import ROTATION, SIZES, Condition, Fields, require_expressed
from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GELU_AND_RELU = (
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
)
_ACTIVATION: Fields = {"activation_function": _GELU_AND_RELU}
_ROTATION: Fields = ROTATION | {"rope_parameters.rope_type": ("default", "linear")}
_NO_WINDOW: Fields = {
    "sliding_window": Condition(
        "none below max_position_embeddings",
        lambda config: (
            (config.sliding_window or config.max_position_embeddings) >= config.max_position_embeddings
        ),
    )
}
_LLAMA: Fields = SIZES | _ROTATION | {"rms_norm_eps": None, "hidden_act": ("silu", "swish")}
_USUAL_HEAD: Fields = {
    "head_dim": Condition(
        "hidden_size / num_attention_heads",
        lambda config: config.head_dim * config.num_attention_heads == config.hidden_size,
    )
}
_FULL: Fields = {"layer_types": ("full_attention",), "sliding_window": None}
_GEMMA_3: Fields = {
    "layer_types": ("full_attention", "sliding_attention"),
    "_sliding_window_pattern": None,
    "query_pre_attn_scalar": Condition(
        "head_dim", lambda config: config.query_pre_attn_scalar == config.head_dim
    ),
}

FAMILIES: Mapping[str, Fields] = MappingProxyType(
    {
        "gpt2": SIZES | _ACTIVATION | {"reorder_and_upcast_attn": None},
        "gptj": SIZES | _ACTIVATION | {"rotary_dim": None},
        "codegen": SIZES | _ACTIVATION | {"rotary_dim": None, "n_ctx": None},
        "gpt_bigcode": SIZES
        | _ACTIVATION
        | dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")),
        "opt": SIZES
        | _ACTIVATION
        | dict.fromkeys(("do_layer_norm_before", "word_embed_proj_dim", "enable_bias")),
        "bloom": SIZES | {"slow_but_exact": None},
        "falcon": SIZES
        | dict.fromkeys(
            ("alibi", "bias", "parallel_attn", "ffn_hidden_size", "num_kv_heads", "num_ln_in_parallel_attn")
        ),
        "llama": _LLAMA | _USUAL_HEAD | dict.fromkeys(("attention_bias", "mlp_bias")),
        "mistral": _LLAMA | _NO_WINDOW,
        "qwen2": _LLAMA | _USUAL_HEAD | _FULL,
        "qwen3": _LLAMA | _FULL | {"attention_bias": None},
        "gemma": SIZES | {"rms_norm_eps": None, "hidden_act": ("gelu", "gelu_pytorch_tanh")},
        "gemma3_text": SIZES | _NO_WINDOW | _GEMMA_3,
    }
)
"""By transformers' model_type."""


def require_family(config: "PretrainedConfig") -> None:
    """Raises UnsupportedError for another family, and for a field of its configuration that is not expressed."""
    fields = FAMILIES.get(config.model_type)
    if fields is None:
        raise UnsupportedError(
            f"CTranslate2 is not known to compute {config.model_type} models as transformers does, only "
            f"{', '.join(FAMILIES)}; ask for the backend torch."
        )
    require_expressed(config, fields, "A model of CTranslate2")
