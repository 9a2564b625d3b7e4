"""A model reference -> a loaded decoder. Imports torch and transformers, so only a measuring process calls it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optigpu.models.bundled import BUNDLED
from optigpu.models.facts import ModelFacts, block_shapes
from optigpu.models.presets import Preset
from optigpu.models.reference import ModelReference, preset_of
from optigpu.vocabulary import UnsupportedError

MODELS_DIR = "OPTIGPU_MODELS_DIR"
"""The environment variable that names the directory which `path:` references lie under."""


def load_model(
    reference: ModelReference, *, device: str, dtype: str, attention: str | None = None, seed: int = 0
) -> Any:
    """A transformers causal language model on `device` in `dtype`, in evaluation mode, set to plain greedy decoding.

    `dtype` is a torch dtype's name; `attention` is transformers' attn_implementation, None its default. A preset's
    weights are random, drawn from `seed`, on the device itself. Raises UnsupportedError when the model cannot be had
    here: no network, no such repository or directory, no safetensors, or an architecture that generates no text.
    """
    from transformers import GenerationConfig

    preset = preset_of(reference)
    options = (device, dtype, attention)
    model = _create(preset, *options, seed) if preset else _read(reference, *options)
    # A repository's own decoding settings (an end token, a repetition penalty) would change what is measured.
    model.generation_config = GenerationConfig(do_sample=False)
    return model.eval().requires_grad_(False)


def load_tokenizer(reference: ModelReference) -> Any:
    """The transformers tokenizer of a model.

    Raises UnsupportedError for a preset, which has none, and when it cannot be had here: no network, no such repository
    or directory, no tokenizer in it.
    """
    from transformers import AutoTokenizer

    if reference.kind == "preset":
        raise UnsupportedError(
            f"{reference} has random weights and no tokenizer; name a trained model, for example bundled:tiny."
        )
    with _one_sentence(reference):
        return AutoTokenizer.from_pretrained(_source(reference), **_reading(reference))


def loaded_facts(model: Any) -> ModelFacts:
    """The facts of a loaded model, read from its configuration by the names that all of transformers shares."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return ModelFacts(
        family=config.model_type,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        tied_head=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        **block_shapes(config.model_type, config.to_dict(), config.hidden_size, heads),
    )


def count_weights(model: Any) -> int:
    """Number of weights; what is tied counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _create(preset: Preset, device: str, dtype: str, attention: str | None, seed: int) -> Any:
    """Random weights in place: inside torch's device context no tensor exists elsewhere or in another dtype."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(preset.model_type, **preset.config)
    chosen = {"attn_implementation": attention} if attention else {}
    torch.manual_seed(seed)
    with torch.device(device), _weights_drawn_once():
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **chosen)


@contextmanager
def _weights_drawn_once() -> Iterator[None]:
    """torch's layers draw weights that transformers overwrites; leaving them out halves the time of making a model."""
    from torch.nn import init
    from transformers.initialization import TORCH_INIT_FUNCTIONS  # torch's own, which transformers draws with

    names = ("kaiming_uniform_", "normal_", "uniform_")
    try:
        for name in names:
            setattr(init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name in names:
            setattr(init, name, TORCH_INIT_FUNCTIONS[name])


def _read(reference: ModelReference, device: str, dtype: str, attention: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    with _one_sentence(reference):
        model: Any = AutoModelForCausalLM.from_pretrained(
            _source(reference),
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            **_reading(reference),
        )
        return model.to(device)


def _source(reference: ModelReference) -> str:
    """What transformers reads from: a directory of this machine, or the name of a repository."""
    if reference.kind == "bundled":
        return str(BUNDLED[reference.name])
    return str(_directory(reference.name)) if reference.kind == "path" else reference.name


def _reading(reference: ModelReference) -> dict[str, Any]:
    """Never remote code, and the network for the hub alone."""
    return {
        "revision": reference.revision or "main",
        "trust_remote_code": False,
        "local_files_only": reference.kind != "hub",
    }


@contextmanager
def _one_sentence(reference: ModelReference) -> Iterator[None]:
    """The library's long errors as one sentence with advice."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        advice = f"; or put it under {MODELS_DIR} and name it path:DIR" if reference.kind == "hub" else ""
        raise UnsupportedError(f"{reference} cannot be loaded here: {why}{advice}.") from error


def _directory(name: str) -> Path:
    """The directory of a `path:` reference; what a link leads to must lie under the model directory as well."""
    if not os.environ.get(MODELS_DIR):
        raise UnsupportedError(f"path:{name} needs a model directory; set {MODELS_DIR} for the worker.")
    root = Path(os.environ[MODELS_DIR]).resolve()
    directory = (root / name).resolve()
    if not directory.is_relative_to(root):
        raise UnsupportedError(f"path:{name} leads out of the model directory; put the model under it.")
    if not directory.is_dir():
        raise UnsupportedError(f"There is no directory path:{name} under the model directory of this worker.")
    return directory
