"""A tiny model of every family of transformers' causal language models, made with random weights, and saved with what
folders of other people have: shards, no dtype, no token for padding, no settings of generation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.tiny_models import VOCABULARY

_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width")
_INNER = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "intermediate_size_mlp",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
_HEADS = ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(_WIDTHS, 64),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(_HEADS, 4),
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "v_head_dim"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "eos_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "pad_token_id"), 2),
    "bos_token_id": 0,
}
"""What a configuration gets of what it has."""
_ODD: dict[str, Any] = _SIZES | {
    "vocab_size": VOCABULARY + 1,
    **dict.fromkeys(_WIDTHS, 48),
    **dict.fromkeys(_INNER, 75),
    **dict.fromkeys(_HEADS, 3),
    **dict.fromkeys(("head_dim", "v_head_dim"), 16),
    "num_key_value_heads": 1,
}
"""The same, with heads that share one key, and sizes that are no multiples of what kernels take at once."""
_EVEN = frozenset(
    ("bamba", "codegen", "dbrx", "diffllama", "granitemoehybrid", "mamba2", "mimo_v2_flash", "moshi")
)
"""Families that cannot have the odd sizes, or another head than they have."""
_ALIGNED = dict.fromkeys(_INNER, 76)
"""What torch's products of experts need: rows that begin at multiples of 16 bytes."""
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_WHOLE_HEADS = {"num_key_value_heads": 4, "head_dim": None}
_SPARSE = _LINEAR | {"mlp_layer_types": ["dense", "sparse"]}
_CONVOLVED = {"layer_types": ["conv", "full_attention"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {"num_key_value_heads": 4, "head_dim": 16}
_OF_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "minicpm3", "youtu"), _WHOLE_HEADS),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _LINEAR),
    "bailing_hybrid": _SPARSE | _LATENT,
    "kimi_linear": _SPARSE | _WHOLE_HEADS,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _SLIDING | {"num_kv_shared_layers": 0}),
    "bamba": {"attn_layer_indices": [1]} | _MAMBA,
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": _SLIDING | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]} | _MAMBA,
    "helium": {"head_dim": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 8,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": _CONVOLVED | {"num_dense_layers": 1},
    "lfm3": _CONVOLVED,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
_WITHOUT = {"falcon": "head_dim"}
"""What cannot be given to a family, though its configuration has it."""
_OTHERS = frozenset(
    (
        *(
            "blt",
            "cohere_compass_text",
            "dots3_note",
            "dots3_note_text",
            "gemma3n",
            "gemma4",
            "gemma4_assistant",
        ),
        *(
            "gemma4_unified",
            "gemma4_unified_assistant",
            "got_ocr2",
            "longcat_flash",
            "moss_transcribe_diarize",
            "musicgen",
        ),
        *(
            "musicgen_melody",
            "phi4_multimodal",
            "prophetnet",
            "qwen4_exp",
            "qwen4_exp_text",
            "reformer",
            "roc_bert",
            "xlnet",
            "xlstm",
        ),
        *("xmod", "zamba"),
    )
)
"""Of several parts, or with sizes that depend on each other in a way of their own."""


def causal_families() -> list[str]:
    """transformers' model types, by name."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - _OTHERS)


def causal_model(family: str, number: int = 0, **fields: Any) -> Any:
    """A model of at most a few million weights, always the same; of an odd `number` with odd sizes, of every third one
    with its head tied or untied as its family does not have it; `fields` of its configuration are as they are given."""
    torch.manual_seed(0)
    number = 0 if family in _EVEN else number
    config = _config(CONFIG_MAPPING[family], _ODD if number % 2 else _SIZES, number % 3 == 2, fields)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)
    model.generation_config = GenerationConfig(do_sample=False)  # as a loaded one has: no token ends it
    return model


def _config(kind: Any, sizes: Mapping[str, Any], other_head: bool, fields: dict[str, Any]) -> Any:
    """Small sizes for what the configuration has, and for the configurations of its parts."""
    usual, family = kind(), kind.model_type
    had = usual.to_dict()
    names = {*had, *kind.attribute_map}
    sizes = sizes | _ALIGNED if sizes is _ODD and names & set(_EXPERTS) else sizes
    changes = {name: value for name, value in sizes.items() if name in names and _WITHOUT.get(family) != name}
    if isinstance(had.get("layer_types"), list):
        changes["layer_types"] = None  # the class makes as many as there are layers
    if other_head:
        changes["tie_word_embeddings"] = not had.get("tie_word_embeddings", True)
    parts = {name: getattr(usual, name, None) for name in kind.sub_configs}
    changes |= {name: _config(type(part), sizes, False, {}).to_dict() for name, part in parts.items() if part}
    own = _OF_FAMILIES.get(family, {})
    if own.get("num_key_value_heads") == _SIZES["num_attention_heads"]:  # each has keys of its own
        own = own | {"num_key_value_heads": sizes["num_attention_heads"]}
    return kind(**(changes | own | fields))


def save(model: Any, folder: Path, number: int = 0) -> None:
    """Writes the model's folder: of an odd `number` in shards and without a dtype, of every third one without a token
    for padding; never with settings of generation."""
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if number % 2 else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if number % 2:
        config.pop("dtype", None)
    if number % 3 == 0:
        config["pad_token_id"] = None
    path.write_text(json.dumps(config))
