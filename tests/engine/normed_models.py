"""Tiny models whose norms have weights of their own; saved as `path:` models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.models.loading.load import MODELS_DIR
from tests.engine.tiny_models import FAMILIES, VOCABULARY

LAYER_NORMED = ("gpt2", "opt")
RMS_NORMED = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""The families by the kind of their norms, and the names of the folders."""


@pytest.fixture(scope="module")
def normed_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model directory with all of these families; OPTIGPU_MODELS_DIR names it."""
    folder: Path = tmp_path_factory.mktemp("normed")
    for name in (*LAYER_NORMED, *RMS_NORMED):
        normed_model(name).save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(folder))
        yield


def normed_model(family: str, **changes: Any) -> Any:
    """A tiny model whose norms have weights of their own, and biases where they can have them."""
    shapes = FAMILIES.get(family, FAMILIES["llama"] | {"head_dim": 16})
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **special, **shapes | changes)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_matrix = parameter.dim() > 1
            parameter.normal_(0, 0.1 if is_matrix else 0.5, generator=generator)
            if not is_matrix and path.endswith("weight"):
                parameter.add_(1)
    return model.eval().requires_grad_(False)
