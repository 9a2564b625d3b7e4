"""GGUF files for llama.cpp: the mapping of tensors, by llama.cpp's own order of rotary pairs."""

from typing import Any

import pytest
import torch

from optigpu.backends.llama_cpp.gguf_tensors import metadata, permuted, rope_factors, tensors
from optigpu.vocabulary import UnsupportedError

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
SCALED = PLAIN | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LAYERS = (
    "attn_k",
    "attn_norm",
    "attn_output",
    "attn_q",
    "attn_v",
    "ffn_down",
    "ffn_gate",
    "ffn_norm",
    "ffn_up",
)


def made(family: str, config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()


def turned_by_neighbours(rows: torch.Tensor, position: int, config: Any) -> torch.Tensor:
    """llama.cpp's rotation of [heads, size]: the pairs (0, 1), (2, 3), ... by theta^(-2i / size) / factor_i."""
    size = rows.shape[-1]
    factors = torch.tensor(rope_factors(config) or [1.0] * (size // 2), dtype=torch.float64)
    pairs = torch.arange(size // 2, dtype=torch.float64)
    angles = position * config.rope_parameters["rope_theta"] ** (-2 * pairs / size) / factors
    even, odd = rows[:, ::2].double(), rows[:, 1::2].double()
    first = even * angles.cos() - odd * angles.sin()
    second = even * angles.sin() + odd * angles.cos()
    return torch.stack([first, second], dim=-1).flatten(1)


@pytest.mark.parametrize("rope", [PLAIN, SCALED], ids=["plain", "llama3 scaling"])
@pytest.mark.parametrize("head_size", [8, 16])
def test_scores_of_permuted_rows_in_llama_cpps_order_are_transformers_scores(
    rope: dict[str, Any], head_size: int
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = made("llama", LLAMA | {"rope_parameters": rope, "head_dim": head_size})
    config, attention = model.config, model.model.layers[0].self_attn
    written = dict(tensors(model))
    x = torch.randn(2, LLAMA["hidden_size"])
    positions = torch.tensor([[100, 3]])

    query = attention.q_proj(x).view(1, 2, 6, head_size).transpose(1, 2)
    key = attention.k_proj(x).view(1, 2, 2, head_size).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(x[None], positions))
    expected = (query[0, :, 0] * key[0, :, 1].repeat_interleave(3, dim=0)).sum(dim=-1)

    theirs = (x[0] @ written["blk.0.attn_q.weight"].T).view(6, head_size)
    their_key = (x[1] @ written["blk.0.attn_k.weight"].T).view(2, head_size)
    turned = turned_by_neighbours(theirs, 100, config)
    turned_key = turned_by_neighbours(their_key, 3, config).repeat_interleave(3, dim=0)
    torch.testing.assert_close((turned * turned_key).sum(dim=-1).float(), expected, rtol=1e-4, atol=1e-6)


def test_halves_become_neighbours_within_each_head() -> None:
    rows = torch.arange(8.0)[:, None] * torch.ones(1, 3)
    assert permuted(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert permuted(torch.arange(6), heads=1).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("tied", [True, False])
def test_llamas_tensors_have_llama_cpps_names(tied: bool) -> None:
    model = made("llama", LLAMA | {"tie_word_embeddings": tied})
    names = {name for name, _ in tensors(model)}
    blocks = {f"blk.{number}.{layer}.weight" for number in (0, 1) for layer in LAYERS}
    assert names == blocks | {"token_embd.weight", "output_norm.weight"} | (
        set() if tied else {"output.weight"}
    )


def test_scaled_rotary_embeddings_bring_their_factors() -> None:
    model = made("llama", LLAMA | {"rope_parameters": SCALED})
    written = dict(tensors(model))["rope_freqs.weight"]
    inverse = model.model.rotary_emb.inv_freq
    plain = 100.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / written, inverse)
    assert written[0] == 1
    assert written[-1] > 1


def test_attention_biases_are_turned_like_their_rows() -> None:
    model = made("llama", LLAMA | {"attention_bias": True})
    bias = torch.randn(48)
    model.model.layers[1].self_attn.q_proj.bias.data.copy_(bias)
    written = dict(tensors(model))
    torch.testing.assert_close(written["blk.1.attn_q.bias"], permuted(bias, 6))
    assert not torch.equal(written["blk.1.attn_q.bias"], bias)


def test_gpt2s_matrices_lie_the_other_way_round() -> None:
    model = made("gpt2", GPT2)
    written = dict(tensors(model))
    assert torch.equal(written["blk.1.ffn_up.weight"], model.transformer.h[1].mlp.c_fc.weight.T)
    assert written["blk.0.attn_qkv.weight"].shape == (96, 32)
    assert torch.equal(written["position_embd.weight"], model.transformer.wpe.weight)
    assert "output.weight" not in written
    assert len(written) == 4 + 2 * 12


def test_metadata_has_llama_cpps_keys() -> None:
    from transformers import AutoConfig

    llama = metadata(AutoConfig.for_model("llama", **LLAMA, head_dim=16, rope_parameters=PLAIN))
    assert llama["llama.attention.head_count_kv"] == 2
    assert llama["llama.attention.key_length"] == llama["llama.rope.dimension_count"] == 16
    assert llama["llama.rope.freq_base"] == 100.0
    assert llama["llama.vocab_size"] == 64
    gpt2 = metadata(AutoConfig.for_model("gpt2", **GPT2))
    assert gpt2["gpt2.feed_forward_length"] == 128
    assert gpt2["gpt2.context_length"] == 32


def test_what_is_not_written_is_refused() -> None:
    from transformers import AutoConfig

    linear: Any = AutoConfig.for_model(
        "llama", **LLAMA, rope_parameters=PLAIN | {"rope_type": "linear", "factor": 2.0}
    )
    with pytest.raises(UnsupportedError, match="rope_type = 'linear', only 'default' or 'llama3'; ask"):
        metadata(linear)
    with pytest.raises(
        UnsupportedError, match="opt models cannot be written as GGUF here, only gpt2 and llama"
    ):
        metadata(AutoConfig.for_model("opt"))
