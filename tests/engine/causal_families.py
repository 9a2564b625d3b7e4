"""A tiny model of every family of transformers' causal language models whose configuration is that of one decoder."""

from typing import Any

from tests.engine.tiny_models import VOCABULARY

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "v_head_dim"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "eos_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "pad_token_id"), 2),
    "bos_token_id": 0,
}
"""What a configuration gets of what it has."""
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_WHOLE_HEADS = {"num_key_value_heads": 4, "head_dim": None}
_OF_FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR | {"mlp_layer_types": ["dense", "sparse"]},
    "bamba": {"attn_layer_indices": [1]} | _MAMBA,
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v3": _WHOLE_HEADS,
    "dots1": {"n_shared_experts": 1},
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
    "kimi_linear": _LINEAR | {"mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 8},
    "zaya": {"num_experts_per_tok": 1},
}
_WITHOUT = {"falcon": "head_dim"}
"""What cannot be given to a family, though its configuration has it."""
_OTHERS = {
    "axk1",
    "axk2",
    "blt",
    "cohere_compass_text",
    "deepseek_v32",
    "dots3_note",
    "dots3_note_text",
    "emu3",
    "fuyu",
    "gemma3",
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_assistant",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "gemma4_unified_text",
    "git",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "got_ocr2",
    "llama4",
    "longcat_flash",
    "mllama",
    "moss_transcribe_diarize",
    "musicgen",
    "musicgen_melody",
    "phi4_multimodal",
    "prophetnet",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "roc_bert",
    "xlnet",
    "xlstm",
    "xmod",
    "youtu",
    "zamba",
    "zamba2",
}
"""Of several parts, or with sizes that depend on each other in a way of their own."""


def causal_families() -> list[str]:
    """transformers' model types, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - _OTHERS)


def causal_model(family: str) -> Any:
    """A model of at most a few million weights, always the same."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    usual = kind()
    changes = {
        name: value for name, value in _SIZES.items() if hasattr(usual, name) and _WITHOUT.get(family) != name
    }
    if isinstance(usual.to_dict().get("layer_types"), list):
        changes["layer_types"] = None  # the class makes as many as there are layers
    torch.manual_seed(0)
    config = kind(**(changes | _OF_FAMILIES.get(family, {})))
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)
    model.generation_config = GenerationConfig(do_sample=False)  # as a loaded one has: no token ends it
    return model
