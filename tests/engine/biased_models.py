"""Tiny models with all the biases that their families can have, none of them zero; saved as `path:` models."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.models.loading.load import MODELS_DIR
from optigpu.techniques.base import Technique
from tests.engine.decoded import operators_run
from tests.engine.tiny_models import FAMILIES, VOCABULARY, runtime_of

BIASED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": FAMILIES["llama"] | {"sliding_window": 6},
    "opt": {},
    "opt-gelu": {"activation_function": "gelu"},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6},
}
"""The folder, whose name begins with the family, and what its configuration says beside that of `tiny_models`."""


@pytest.fixture(scope="module")
def biased_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model directory with all of BIASED; OPTIGPU_MODELS_DIR names it."""
    folder: Path = tmp_path_factory.mktemp("biased")
    for name in BIASED:
        biased_model(name).save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(folder))
        yield


def biased_model(name: str) -> Any:
    """The model in float32, its weights larger than usual, so that its tokens depend on its inputs."""
    family = name.partition("-")[0]
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    shapes = FAMILIES.get(family, {}) | BIASED[name]
    return with_biases(
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, vocab_size=VOCABULARY, **special, **shapes)
        )
    )


def with_biases(model: Any) -> Any:
    """The model with new weights, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
    return model.eval().requires_grad_(False)


def operators(name: str, *stack: Technique) -> Counter[str]:
    """How often each operator runs in one request of a model with a stack."""
    return operators_run(runtime_of(f"path:{name}", *stack))
