"""A tiny random model of each family that is written as GGUF, and the logits that llama.cpp has of its file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
OF_GPT2: dict[str, Any] = {
    "vocab_size": 300, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1
}  # fmt: skip
_NO_GROUPS = {"num_key_value_heads": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "num_hidden_layers": 7, "sliding_window": 16}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LONG = {"rope_theta": 1e4, "original_max_position_embeddings": 8192}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_GROWS = {
    "full_attention": _LINEAR | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama, tied head": ("llama", SIZES | {"tie_word_embeddings": True}),
    "llama, wide heads and biases": (
        "llama",
        SIZES | {"head_dim": 48, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, llama3 scaling": ("llama", SIZES | {"rope_parameters": _LLAMA3}),
    "llama, Llama 3's scaling": ("llama", SIZES | {"rope_parameters": _LLAMA3 | _LONG}),
    "llama, yarn": ("llama", SIZES | {"rope_parameters": _YARN}),
    "llama, linear scaling": ("llama", SIZES | {"rope_parameters": _LINEAR}),
    "mistral": ("mistral", SIZES),
    "mixtral": ("mixtral", SIZES | _EXPERTS),
    "qwen2": ("qwen2", SIZES),
    "qwen2, yarn": ("qwen2", SIZES | {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 64}),
    "qwen3_moe": (
        "qwen3_moe",
        SIZES | _EXPERTS | {"head_dim": 64, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gemma": ("gemma", SIZES | {"head_dim": 64}),
    "gemma2": ("gemma2", SIZES | _GEMMA),
    "gemma3_text": ("gemma3_text", SIZES | _GEMMA),
    "gemma3_text, linear scaling": ("gemma3_text", SIZES | _GEMMA | {"rope_parameters": _GROWS}),
    "phi3": ("phi3", SIZES | {"pad_token_id": 0}),
    "phi": ("phi", SIZES),
    "olmo": ("olmo", SIZES | {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", SIZES | {"tie_word_embeddings": True}),
    "olmo3": ("olmo3", SIZES | {"num_hidden_layers": 5, "sliding_window": 16}),
    "olmoe": ("olmoe", SIZES | _NO_GROUPS | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        SIZES | _EXPERTS | {"head_dim": 64, "sliding_window": 16, "rope_parameters": _YARN},
    ),
    "granite": (
        "granite",
        SIZES
        | {
            "logits_scaling": 2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3,
            "attention_multiplier": 0.1,
        },
    ),
    "smollm3": ("smollm3", SIZES | {"num_hidden_layers": 5, "pad_token_id": 0}),
    "ernie4_5": ("ernie4_5", SIZES | {"head_dim": 64}),
    "cohere": ("cohere", SIZES | {"logit_scale": 0.5}),
    "cohere2": ("cohere2", SIZES | {"num_hidden_layers": 5, "sliding_window": 16, "logit_scale": 0.5}),
    "nemotron": ("nemotron", SIZES),
    "starcoder2": ("starcoder2", SIZES),
    "stablelm": ("stablelm", SIZES | {"use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", SIZES | {"use_parallel_residual": True}),
    "gpt_neox": ("gpt_neox", SIZES | _NO_GROUPS | {"hidden_act": "gelu_new"}),
    "gpt_neox, one after the other": ("gpt_neox", SIZES | _NO_GROUPS | {"use_parallel_residual": False}),
    "gpt2": ("gpt2", OF_GPT2),
    "gpt_bigcode": ("gpt_bigcode", OF_GPT2),
    "bloom": ("bloom", OF_GPT2 | {"hidden_size": 128}),
}


def made(name: str) -> PreTrainedModel:
    """The model of that name, whose norms and biases do something."""
    family, fields = MODELS[name]
    torch.manual_seed(0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id"))
    config = AutoConfig.for_model(family, **(special | fields))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        # What float16 holds. Not the whole model: a rotary embedding's frequencies are a buffer.
        parameter.copy_(parameter.half())
    return model


def scored(path: Path, tokens: NDArray[np.int64], vocabulary: int, exact: bool) -> NDArray[np.float32]:
    """llama.cpp's logits after each token of a sequence, [tokens, vocabulary]."""
    from optigpu.backends.llama_cpp.gguf_facts import ExactCaches, asked_of
    from optigpu.backends.llama_cpp.native import LlamaCpp
    from optigpu.backends.llama_cpp.runtime import Context, GgufModel

    loaded = GgufModel(LlamaCpp(), path, vocabulary)
    context = Context(loaded, 1, len(tokens), asked_of((), "F32" if exact else "F16", 1, ExactCaches()))
    found = np.stack([context.forward(token[None, None])[0].copy() for token in tokens])
    context.close()
    loaded.close()
    return found
