"""llama.cpp reads the GGUF files that are written here as transformers computes the models they are written from.

Small models with sharp attention, where a row in the wrong place makes a difference as large as the logits.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.llama

EXACT, ROUNDED = 1e-3, 1e-2
"""The largest difference over the largest logit, with everything in float32 (llama.cpp looks GELU up in a table of
float16), and with float16 matrices, which hold these models exactly, a float16 cache and flash attention."""
TOKENS = 96
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 512, "n_embd": 256, "n_layer": 3, "n_head": 4, "initializer_range": 0.1}),
    "tied head": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "untied head": ("llama", LLAMA | {"tie_word_embeddings": False}),
    "wide heads": ("llama", LLAMA | {"tie_word_embeddings": False, "head_dim": 64}),
    "llama3 scaling": ("llama", LLAMA | {"tie_word_embeddings": True, "rope_parameters": SCALED}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A random model whose norms and biases do something, of weights that float16 holds."""
    family, config = MODELS[request.param]
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
    for parameter in made.requires_grad_(False).parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        # Not the whole model: a rotary embedding's frequencies are a buffer.
        parameter.copy_(parameter.half())
    return made


def difference(model: PreTrainedModel, path: Path, exact: bool) -> float:
    """The largest difference of the logits after each of TOKENS random tokens, over the largest logit."""
    from optigpu.backends.llama_cpp.file_types import ExactCaches, asked_of
    from optigpu.backends.llama_cpp.gguf_file import write
    from optigpu.backends.llama_cpp.native import LlamaCpp
    from optigpu.backends.llama_cpp.runtime import Context, GgufModel

    write(model, path, "float32" if exact else "float16")
    tokens = torch.randint(model.config.vocab_size, (1, TOKENS))
    expected = model(input_ids=tokens).logits[0].numpy()
    loaded = GgufModel(LlamaCpp(), path, model.config.vocab_size)
    context = Context(loaded, 1, TOKENS, asked_of((), "F32" if exact else "F16", 1, ExactCaches()))
    found = np.stack([context.forward(token[None, None])[0].copy() for token in tokens[0].numpy()])
    context.close()
    loaded.close()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_logits_in_float32_are_transformers_logits(model: PreTrainedModel, tmp_path: Path) -> None:
    assert difference(model, tmp_path / "model.gguf", exact=True) <= EXACT


def test_logits_with_float16_matrices_are_rounded_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    assert difference(model, tmp_path / "model.gguf", exact=False) <= ROUNDED


def test_a_file_holds_the_weights_of_the_model(model: PreTrainedModel, tmp_path: Path) -> None:
    from optigpu.backends.llama_cpp.gguf_file import write
    from optigpu.backends.llama_cpp.runtime import contents_of

    path = tmp_path / "model.gguf"
    write(model, path, "float32")
    contents = contents_of(path, str)
    assert contents.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert contents.streamed_bytes < contents.file_bytes == path.stat().st_size
    width = model.config.hidden_size
    positions = 4 * width if model.config.model_type == "gpt2" else 0
    assert contents.row_bytes == positions + (0 if model.config.tie_word_embeddings else 4 * width)
