"""Tiny mixtures of experts, one of each way in which transformers holds their matrices."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.tiny_models import VOCABULARY

_SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _SHAPES,
    "gpt_oss": _SHAPES | {"head_dim": 32, "layer_types": ["full_attention"]},
    "nemotron_h": _SHAPES
    | {
        "head_dim": 32,
        "layers_block_type": ["attention", "moe"],
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
    },
    "jetmoe": _SHAPES | {"kv_channels": 32},
    "llama4_text": _SHAPES
    | {
        "head_dim": 32,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "layer_types": ["full_attention"],
        "moe_layers": [0],
    },
}
"""By transformers' model_type: [outputs, inner]; transposed with biases; not gated; lone products; each in its turn."""


def mixture(family: str) -> Any:
    """A model with larger random weights and biases than usual."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **special, **MIXTURES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            parameter.copy_(0.2 * torch.randn_like(parameter))
        elif parameter.dim() > 1:
            parameter.mul_(5)
    return model
