"""Families that are written as GGUF: llama.cpp's logits and tokens are transformers'; the rest is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from optigpu.backends.llama_cpp.gguf_families import WRITTEN_FAMILIES
from optigpu.backends.llama_cpp.gguf_tensors import Matrices, metadata, tensors, write
from optigpu.vocabulary import UnsupportedError
from tests.engine.gguf_models import MODELS, SIZES, made, scored

pytestmark = pytest.mark.llama
TOKENS = 96
EXACT, ROUNDED = 1e-3, 1e-2
"""The largest difference over the largest logit, with everything in float32 (llama.cpp looks GELU up in a table of
float16), and with float16 matrices, which hold these models exactly, a float16 cache and flash attention."""


def test_each_written_family_has_a_model_here() -> None:
    assert {family for family, _ in MODELS.values()} == set(WRITTEN_FAMILIES)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return made(request.param)


def difference(model: PreTrainedModel, path: Path, matrices: Matrices) -> float:
    """The largest of the logits after each of TOKENS random tokens, over the largest logit."""
    write(model, path, matrices)
    tokens = torch.randint(model.config.vocab_size, (1, TOKENS))
    expected = model(input_ids=tokens).logits[0].numpy()
    found = scored(path, tokens[0].numpy(), model.config.vocab_size, exact=matrices == "float32")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_logits_in_float32_are_transformers_logits(model: PreTrainedModel, tmp_path: Path) -> None:
    assert difference(model, tmp_path / "model.gguf", "float32") <= EXACT


def test_logits_with_float16_matrices_are_rounded_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    assert difference(model, tmp_path / "model.gguf", "float16") <= ROUNDED


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3", "gemma3_text", "phi3", "olmo2", "gpt_oss"])
def test_greedy_tokens_are_transformers_tokens(name: str, tmp_path: Path) -> None:
    model: Any = made(name)
    write(model, tmp_path / "model.gguf", "float32")
    prompt = torch.arange(8, 20)[None]
    options = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False}
    whole = model.generate(prompt, **options)[0].numpy()
    found = scored(tmp_path / "model.gguf", whole, model.config.vocab_size, exact=True)
    assert found[prompt.shape[1] - 1 : -1].argmax(-1).tolist() == whole[prompt.shape[1] :].tolist()


def configured(family: str, **fields: Any) -> Any:
    return AutoConfig.for_model(family, **(SIZES | fields))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "opt models cannot be written as GGUF here": ("opt", {}),
    "rope_parameters.rope_type = 'dynamic', only 'default' or 'linear' or 'llama3' or 'yarn'; ask": (
        "llama", {"rope_parameters": DYNAMIC},
    ),
    "hidden_act = 'gelu', only 'silu' or 'swish'": ("llama", {"hidden_act": "gelu"}),
    "head_dim = 48, only hidden_size / num_attention_heads": ("qwen2", {"head_dim": 48}),
    "query_pre_attn_scalar = 256, only head_dim": ("gemma2", {"head_dim": 64}),
    "tie_word_embeddings = False, only True": ("cohere", {"tie_word_embeddings": False}),
    "norm_topk_prob = False, only True": ("qwen3_moe", {"num_local_experts": 4}),
    "num_key_value_heads = 2, only num_attention_heads": ("olmoe", {}),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_llama_cpp_does_not_compute_is_refused(words: str) -> None:
    family, fields = REFUSED[words]
    with pytest.raises(UnsupportedError) as raised:
        metadata(configured(family, **fields), 192)
    assert words in str(raised.value)


def test_a_context_ends_where_a_window_that_llama_cpp_does_not_have_would_cut_it() -> None:
    assert metadata(configured("mistral", sliding_window=100), 192)["llama.context_length"] == 100
    gemma = metadata(configured("gemma2", sliding_window=100, head_dim=64, query_pre_attn_scalar=64), 192)
    assert gemma["gemma2.context_length"] == 256
    assert gemma["gemma2.attention.sliding_window_pattern"] == [True, False]


def test_a_tensor_without_a_place_is_refused_by_its_name() -> None:
    model = made("llama")
    model.model.layers[1].self_attn.extra = torch.nn.Linear(4, 4)
    with pytest.raises(
        UnsupportedError, match=r"have no place for this model's model.layers.1.self_attn.extra.weight"
    ):
        dict(tensors(model))
