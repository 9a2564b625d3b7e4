"""Tiny models of every family that a decoder's program is filled from, plain and packed."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.cpu.packing import unpack
from optigpu.ops.decode.program import CacheKind
from optigpu.surgery.places import expert_places, linear_places, weight_of
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.programs import attached
from tests.engine.tiny_models import FAMILIES, VOCABULARY

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_WINDOW = 5
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    "num_experts_per_tok": 2,
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": _WINDOW}
_WINDOWED = _LAYERS | {"head_dim": 32}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96, "n_head": 2}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "activation_function": "gelu"}),
    "opt": ("opt", {}),
    "opt-untied": ("opt", {"enable_bias": False, "tie_word_embeddings": False}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "head_dim": 32, "rms_norm_eps": 1e-2}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN, "num_key_value_heads": 4}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": _WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
    ),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        _WINDOWED
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        _WINDOWED
        | {
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            },
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "ministral": ("ministral", _WINDOWED),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _LAYERS),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "phi": ("phi", {"rope_parameters": _HALF}),
    "phi-norms": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": _WINDOW}),
    "phi3-long": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 32}),
    "granite": ("granite", _GRANITE),
    "starcoder2": ("starcoder2", {"sliding_window": _WINDOW}),
    "stablelm": ("stablelm", {"rope_parameters": _HALF}),
    "stablelm-parallel": (
        "stablelm",
        dict.fromkeys(("use_parallel_residual", "use_qkv_bias", "qk_layernorm"), True),
    ),
    "gpt_neox": ("gpt_neox", {"rope_parameters": _HALF}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False}),
    "gptj": ("gptj", FAMILIES["gpt2"] | {"rotary_dim": 8}),
    "cohere": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", _LAYERS),
    "mixtral": ("mixtral", _EXPERTS | {"sliding_window": _WINDOW}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"head_dim": 32}),
    "olmoe": ("olmoe", _EXPERTS),
    "granitemoe": ("granitemoe", _EXPERTS | _GRANITE),
    "glm4_moe": (
        "glm4_moe",
        _EXPERTS
        | {
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt_oss": ("gpt_oss", _EXPERTS | _WINDOWED),
    "nemotron": ("nemotron", {"rope_parameters": _HALF, "mlp_bias": True}),
}
"""By name: the family, and what its configuration says beside the shapes."""


def decoder_model(name: str) -> Any:
    """A model of DECODERS, as load_model would give it."""
    family, changes = DECODERS[name]
    return configured(family, **changes)


def model_of(config: Any) -> Any:
    """A model with larger random weights than usual, and biases and norms that make a difference."""
    torch.manual_seed(0)
    # Faster attentions leave soft caps out.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(5)
        else:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def configured(family: str, **changes: Any) -> Any:
    """Such a model of a family."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    shapes = FAMILIES.get(family, FAMILIES["llama"])
    return model_of(AutoConfig.for_model(family, vocab_size=VOCABULARY, **special, **(shapes | changes)))


def packed(model: Any, technique: NativeDecode | None = None) -> tuple[Any, Notes]:
    """The model itself, its weights packed, and what was recorded."""
    notes = Notes()
    (technique or NativeDecode(weights="w4", calibration="none")).modules(model, notes)
    return model, notes


def twin(plain: Any, model: Any) -> Any:
    """The plain model with the unpacked weights and tables."""
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
    with torch.no_grad():
        for path, module in plain.named_modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.copy_(model.get_submodule(path).weight)
        for place in [*expert_places(plain), *linear_places(plain)]:
            weight_of(place.layer).copy_(unpack(model.get_submodule(place.path).matrix))
        own = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():  # routers
            own[name].copy_(parameter)
    return plain


def decoder_of(model: Any, kv: CacheKind = "bf16") -> CpuDecoder:
    """The operator with a packed model's program."""
    return CpuDecoder(attached(model), kv, threads=1)


def divergence_of(model: Any, plain: Any, tokens: Any) -> float:
    """The mean divergence of a model's next tokens from those of the plain one, in nats."""
    with torch.no_grad():
        expected, found = (each(tokens).logits.double().log_softmax(-1) for each in (plain, model))
    return float((expected.exp() * (expected - found)).sum(-1).mean())
