"""What llama.cpp calls the tensors of a transformers GPT-2 or Llama, and how it wants them to lie.

Pure mappings: nothing here needs llama.cpp or the package gguf.
"""

import math
from collections.abc import Iterator
from typing import Any

from optigpu.vocabulary import UnsupportedError

_GPT2_BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_LLAMA_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Named = Iterator[tuple[str, Any]]


def metadata(config: Any) -> dict[str, int | float]:
    """The numbers that a GGUF file has beside its tensors, under llama.cpp's keys.

    Raises UnsupportedError for a family that is not written here.
    """
    makers = {"gpt2": _gpt2_metadata, "llama": _llama_metadata}
    found = _of_family(makers, config)(config) | {"vocab_size": config.vocab_size}
    return {f"{config.model_type}.{key}": value for key, value in found.items()}


def tensors(model: Any) -> Named:
    """llama.cpp's names and the model's tensors, one after the other; a tied head is left out, as it expects.

    Raises UnsupportedError for a family or a rotary embedding that is not written here.
    """
    makers = {"gpt2": _gpt2_tensors, "llama": _llama_tensors}
    for name, tensor in _of_family(makers, model.config)(model):
        yield name, tensor.detach()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        yield "output.weight", model.get_output_embeddings().weight.detach()


def permuted(tensor: Any, heads: int) -> Any:
    """The rows of queries or keys [heads * size, ...] with halves interleaved: i and i + size / 2 become neighbours.

    llama.cpp turns neighbouring pairs where transformers turns a row of the first half with one of the second.
    """
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope_factors(config: Any) -> list[float] | None:
    """What llama.cpp divides each pair's frequency by for Llama 3's scaling, [head_size / 2]; None without scaling.

    Raises UnsupportedError for another scaling. Source: Llama 3.1's `apply_scaling`, as llama.cpp's converter has it.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise UnsupportedError(f"Rotary scaling {rope['rope_type']!r} is not written as GGUF here.")
    size, low, high = config.head_dim, rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / size)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def _of_family(makers: dict[str, Any], config: Any) -> Any:
    if config.model_type not in makers:
        known = ", ".join(makers)
        raise UnsupportedError(f"There is no GGUF writer for {config.model_type} here; it knows {known}.")
    return makers[config.model_type]


def _gpt2_metadata(config: Any) -> dict[str, int | float]:
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
    }


def _llama_metadata(config: Any) -> dict[str, int | float]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def _gpt2_tensors(model: Any) -> Named:
    body = model.transformer
    yield "token_embd.weight", body.wte.weight
    yield "position_embd.weight", body.wpe.weight
    yield "output_norm.weight", body.ln_f.weight
    yield "output_norm.bias", body.ln_f.bias
    for number, block in enumerate(body.h):
        for theirs, ours in _GPT2_BLOCK.items():
            layer = block.get_submodule(theirs)
            # Conv1D keeps its matrix the other way round.
            yield f"blk.{number}.{ours}.weight", layer.weight.T if layer.weight.dim() == 2 else layer.weight
            yield f"blk.{number}.{ours}.bias", layer.bias


def _llama_tensors(model: Any) -> Named:
    import torch

    config, body = model.config, model.model
    turned = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    yield "token_embd.weight", body.embed_tokens.weight
    yield "output_norm.weight", body.norm.weight
    factors = rope_factors(config)
    if factors:
        yield "rope_freqs.weight", torch.tensor(factors)
    for number, block in enumerate(body.layers):
        for theirs, ours in _LLAMA_BLOCK.items():
            layer = block.get_submodule(theirs)
            for kind in ("weight", "bias"):
                tensor = getattr(layer, kind, None)
                if tensor is not None:
                    rows = permuted(tensor, turned[ours]) if ours in turned else tensor
                    yield f"blk.{number}.{ours}.{kind}", rows
