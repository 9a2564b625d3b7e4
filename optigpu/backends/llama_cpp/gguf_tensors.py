"""What llama.cpp calls the tensors of a transformers GPT-2 or Llama, and how it wants them laid out.

Mappings only: nothing here needs llama.cpp or the package gguf.
"""

import math
from collections.abc import Iterator

import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

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

Metadata = dict[str, int | float]
Named = Iterator[tuple[str, torch.Tensor]]


def metadata(config: object) -> Metadata:
    """The numbers that a GGUF file holds beside its tensors, under llama.cpp's keys.

    `config` is the model's transformers configuration. Raises UnsupportedError for another family.
    """
    match config:
        case GPT2Config():
            family, found = "gpt2", _gpt2_metadata(config)
        case LlamaConfig():
            family, found = "llama", _llama_metadata(config)
        case _:
            raise _unknown(config)
    return {f"{family}.{key}": value for key, value in found.items()}


def tensors(model: PreTrainedModel) -> Named:
    """llama.cpp's names and the model's tensors, one after the other; a tied head is left out, as llama.cpp expects.

    Raises UnsupportedError for another family and for a rotary embedding that is not written here.
    """
    config = model.config
    match config:
        case GPT2Config():
            yield from _gpt2_tensors(model, config)
        case LlamaConfig():
            yield from _llama_tensors(model, config)
        case _:
            raise _unknown(config)
    head = model.get_parameter("lm_head.weight")
    if head is not model.get_input_embeddings().weight:
        yield "output.weight", head.detach()


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of queries or keys [heads * size, ...] with halves interleaved: i and i + size / 2 become neighbours.

    llama.cpp rotates neighbouring pairs where transformers rotates a row of the first half with one of the second.
    """
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope_factors(config: LlamaConfig) -> list[float] | None:
    """What llama.cpp divides each pair's frequency by for Llama 3's scaling, [head_size / 2]; None without scaling.

    Raises UnsupportedError for another scaling. Source: Llama 3.1's `apply_scaling`, as llama.cpp's converter has it.
    """
    rope = dict(config.rope_parameters or {})
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise UnsupportedError(f"The rotary scaling {rope['rope_type']!r} cannot be written as GGUF here.")
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    size = _head_size(config)
    factors = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / size)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def _unknown(config: object) -> UnsupportedError:
    family = getattr(config, "model_type", type(config).__name__)
    return UnsupportedError(f"{family} models cannot be written as GGUF here, only gpt2 and llama models.")


def _gpt2_metadata(config: GPT2Config) -> Metadata:
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": config.vocab_size,
    }


def _llama_metadata(config: LlamaConfig) -> Metadata:
    size = _head_size(config)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _kv_heads(config),
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": size,
        "rope.freq_base": float(dict(config.rope_parameters or {})["rope_theta"]),
        "vocab_size": config.vocab_size,
    }


def _head_size(config: LlamaConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def _kv_heads(config: LlamaConfig) -> int:
    return config.num_key_value_heads or config.num_attention_heads


def _gpt2_tensors(model: PreTrainedModel, config: GPT2Config) -> Named:
    def weight(name: str) -> torch.Tensor:
        return model.get_parameter(f"transformer.{name}").detach()

    yield "token_embd.weight", weight("wte.weight")
    yield "position_embd.weight", weight("wpe.weight")
    yield "output_norm.weight", weight("ln_f.weight")
    yield "output_norm.bias", weight("ln_f.bias")
    for number in range(config.n_layer):
        for theirs, ours in _GPT2_BLOCK.items():
            matrix = weight(f"h.{number}.{theirs}.weight")
            # Conv1D keeps its matrix transposed.
            yield f"blk.{number}.{ours}.weight", matrix.T if matrix.dim() == 2 else matrix
            yield f"blk.{number}.{ours}.bias", weight(f"h.{number}.{theirs}.bias")


def _llama_tensors(model: PreTrainedModel, config: LlamaConfig) -> Named:
    rotated = {"attn_q": config.num_attention_heads, "attn_k": _kv_heads(config)}
    found = {name.removeprefix("model."): tensor.detach() for name, tensor in model.named_parameters()}
    yield "token_embd.weight", found["embed_tokens.weight"]
    yield "output_norm.weight", found["norm.weight"]
    factors = rope_factors(config)
    if factors:
        yield "rope_freqs.weight", torch.tensor(factors)
    for number in range(config.num_hidden_layers):
        for theirs, ours in _LLAMA_BLOCK.items():
            for kind in ("weight", "bias"):
                tensor = found.get(f"layers.{number}.{theirs}.{kind}")
                if tensor is not None:
                    rows = permuted(tensor, rotated[ours]) if ours in rotated else tensor
                    yield f"blk.{number}.{ours}.{kind}", rows
