"""Tiny models of many kinds, saved as `path:` models, and runtimes made of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    with _saved(tmp_path_factory.mktemp("models"), tiny_model, FAMILIES) as folder:
        yield folder


@contextmanager
def _saved(folder: Path, make: Callable[[str], Any], names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        make(name).save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(folder))
        yield folder


def model_with(family: str, shapes: dict[str, Any]) -> Any:
    """A model in evaluation mode with the usual random weights."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **special, **shapes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_model(family: str) -> Any:
    """A model with larger random weights than usual, so that its tokens depend on its inputs."""
    model = model_with(family, FAMILIES[family])
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


BIASED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": FAMILIES["llama"] | {"sliding_window": 6},
    "opt": {},
    "opt-gelu": {"activation_function": "gelu"},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6},
}
"""The folder, whose name begins with the family, and what its configuration says beside that of FAMILIES: all
biases that it can have are there, none of them zero."""


@pytest.fixture(scope="module")
def biased_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model directory with all of BIASED; OPTIGPU_MODELS_DIR names it."""
    with _saved(tmp_path_factory.mktemp("biased"), biased_model, BIASED):
        yield


def biased_model(name: str) -> Any:
    """The model in float32, its weights larger than usual, so that its tokens depend on its inputs."""
    family = name.partition("-")[0]
    return with_biases(model_with(family, FAMILIES.get(family, {}) | BIASED[name]))


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


LAYER_NORMED = ("gpt2", "opt")
RMS_NORMED = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""The families by the kind of their norms, and the names of the folders."""


@pytest.fixture(scope="module")
def normed_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model directory with all of these families; OPTIGPU_MODELS_DIR names it."""
    with _saved(tmp_path_factory.mktemp("normed"), normed_model, (*LAYER_NORMED, *RMS_NORMED)):
        yield


def normed_model(family: str, **changes: Any) -> Any:
    """A tiny model whose norms have weights of their own, and biases where they can have them."""
    shapes = FAMILIES.get(family, FAMILIES["llama"] | {"head_dim": 16})
    model = model_with(family, shapes | changes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_matrix = parameter.dim() > 1
            parameter.normal_(0, 0.1 if is_matrix else 0.5, generator=generator)
            if not is_matrix and path.endswith("weight"):
                parameter.add_(1)
    return model.requires_grad_(False)


_MIXED: dict[str, Any] = _LLAMA_LIKE | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _MIXED,
    "gpt_oss": _MIXED | {"head_dim": 32, "layer_types": ["full_attention"]},
    "nemotron_h": _MIXED
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
    "jetmoe": _MIXED | {"kv_channels": 32},
    "llama4_text": _MIXED
    | {
        "head_dim": 32,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "layer_types": ["full_attention"],
        "moe_layers": [0],
    },
}
"""One of each way in which transformers holds experts, by its model_type: [outputs, inner]; transposed with biases; not
gated; lone products; each in its turn."""


def mixture(family: str) -> Any:
    """A model with larger random weights and biases than usual."""
    model = model_with(family, MIXTURES[family]).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            parameter.copy_(0.2 * torch.randn_like(parameter))
        elif parameter.dim() > 1:
            parameter.mul_(5)
    return model
