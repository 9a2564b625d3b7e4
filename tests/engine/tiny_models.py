"""Tiny models of four families, saved as `path:` models, and runtimes made of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.job.spec import resolve
from optigpu.models.loading.load import MODELS_DIR
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind

_LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": _LLAMA_LIKE | {"tie_word_embeddings": False},
    "opt": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 64,
    },
    "qwen2": _LLAMA_LIKE | {"tie_word_embeddings": True},
}
VOCABULARY = 96


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model directory that holds `gpt2`, `llama`, `opt` and `qwen2`; OPTIGPU_MODELS_DIR names it."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_model(family).save_pretrained(folder / family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(folder))
        yield folder


def tiny_model(family: str) -> Any:
    """A model with larger random weights than usual, so that its tokens depend on its inputs."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **special, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def runtime_of(model: str, *stack: Technique) -> DecodingModel:
    """The model on this CPU with the stack applied."""
    return DecodingModel(model, resolve(stack, "generate"), DeviceKind.CPU, seed=0, progress=ignore)


def asked(model: DecodingModel, folder: Path = Path("unused")) -> TorchDecodingRuntime:
    """What workloads and meters ask of such a model."""
    return TorchDecodingRuntime(model, folder)


def ignore(doing: str) -> None:
    """Ignores progress."""


def prompt(batch: int = 2, length: int = 8) -> Any:
    """Ids [batch, length], always the same."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_needs_hook(technique: Technique, hook: str, claim: Callable[[], None]) -> None:
    """The claim holds, and it fails once the technique's hook does nothing."""
    claim()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(technique), hook, getattr(Technique, hook))
        with pytest.raises(AssertionError):
            claim()
