"""Loads models from their references."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn import Module, init
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import TORCH_INIT_FUNCTIONS  # torch's own, which transformers draws with

from optigpu.documents.facts import ImageFacts, ModelFacts
from optigpu.models.bring import why_no_hub
from optigpu.models.described import configuration_file, facts_of, image_facts_from_config, kept_facts
from optigpu.models.families import family_of
from optigpu.models.held import (
    CONFIGURATION,
    GGUF,
    TOKENIZER,
    TOKENIZER_CONFIGURATION,
    gguf_file,
    model_directory,
    read_configuration,
    require_objects,
    require_sound,
    sound_directory,
)
from optigpu.models.held import MODELS_DIR as MODELS_DIR  # offered to who makes such a directory
from optigpu.models.loading.checkpoint import count_packed, packing_of, read_packed, read_whole, widen
from optigpu.models.loading.gguf_file import forget_quantizer, restore, sound_gguf
from optigpu.models.reference import BUNDLED, IMAGE_PRESETS, PRESETS, ModelReference, Preset, preset_of
from optigpu.vocabulary import OptiGPUError, UnsupportedError

_SETTLING_IMAGES, _SETTLING_SIDE = 4, 64
_DECODER = ("hidden_size", "num_hidden_layers", "vocab_size")
"""What the configuration of a decoder has."""
_KIND = re.compile(r"^\w*(Error|Exception): ")
_CONTEXTS = ("max_position_embeddings", "max_seq_len")
"""What configurations call the number of positions; other names of families are the first one's aliases."""


def load_model(
    reference: ModelReference,
    *,
    device: str,
    dtype: str,
    attention: str | None = None,
    seed: int = 0,
    packed: str | None = None,
) -> PreTrainedModel:
    """A transformers causal language model on `device` in `dtype` (by name), in evaluation mode; it decodes greedily.

    `attention` is transformers' attn_implementation, None its default. A preset's weights are random, drawn from `seed`
    on the device. `packed` names the method (gptq, awq) whose 4-bit layers may stay packed; without it they are
    widened. Raises UnsupportedError if the model cannot be loaded here: no network, no such repository or directory, no
    safetensors, no text generation, layers packed in another way, or a checkpoint that is not whole (`read_whole`).
    """
    preset = preset_of(reference)
    options = (AutoModelForCausalLM, device, dtype, attention)
    model = _create(preset, *options, seed) if preset else _read(reference, *options, packed)
    # An end token or a repetition penalty of the repository's own settings would change the figures.
    model.generation_config = GenerationConfig(do_sample=False)
    model.eval().requires_grad_(False)
    return model


def load_image_model(
    reference: ModelReference, *, device: str, dtype: str, attention: str | None = None, seed: int = 0
) -> PreTrainedModel:
    """As `load_model`, an image classifier. A model without attention cannot be asked for one.

    A preset's batch norms have the statistics of random images, so that these neither fade away nor grow by the layer.
    """
    preset = preset_of(reference)
    options = (AutoModelForImageClassification, device, dtype, attention)
    if preset is None:
        model = _read(reference, *options)
        model.eval().requires_grad_(False)
        return model
    config = AutoConfig.for_model(preset.model_type, **preset.config)
    _require_attention(AutoModelForImageClassification, config, attention)
    model = _create(preset, *options, seed)
    model.requires_grad_(False)
    _settle(model)
    model.eval()
    return model


class ClassLogits(Module):
    """A classifier's logits alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Logits [batch, classes]."""
        logits: torch.Tensor = self.model(pixel_values=pixel_values).logits
        return logits


def classifies_images(reference: ModelReference) -> bool:
    return type(config_of(reference)) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING


def config_of(reference: ModelReference) -> PretrainedConfig:
    """transformers' configuration of a model. Raises UnsupportedError if it cannot be read here."""
    preset = preset_of(reference)
    if preset is not None:
        return AutoConfig.for_model(preset.model_type, **preset.config)
    with _one_sentence(reference):
        config: PretrainedConfig = AutoConfig.from_pretrained(source_of(reference), **reading_of(reference))
    return config


def has_attention(config: PretrainedConfig) -> bool:
    config = config.get_text_config(decoder=True)
    return getattr(config, "is_heterogeneous", False) or hasattr(config, "num_attention_heads")


def _require_attention(kind: Any, config: PretrainedConfig, attention: str | None) -> None:
    """Raises UnsupportedError for a model that cannot be asked for that attention. `kind` is an Auto class."""
    if not attention:
        return
    if not has_attention(config):
        raise UnsupportedError(
            f"This model has no attention, so {attention} has no effect; leave the techniques for attention out."
        )
    classes = kind._model_mapping[type(config)]
    if attention == "sdpa" and not (classes[0] if isinstance(classes, tuple) else classes)._supports_sdpa:
        raise UnsupportedError(
            f"transformers has no {attention} attention for {config.model_type} models; leave the techniques that ask "
            "for it out."
        )


def load_tokenizer(reference: ModelReference) -> PreTrainedTokenizerBase:
    """A model's tokenizer. Raises UnsupportedError for a preset, which has none, and when it cannot be had here."""
    if reference.kind == "preset":
        raise UnsupportedError(
            f"{reference} has random weights and no tokenizer; name a trained model, for example bundled:tiny."
        )
    with _one_sentence(reference, f"{CONFIGURATION} and {TOKENIZER}"):
        if reference.kind == "path" and not gguf_file(reference):
            require_objects(
                Path(source_of(reference)), (CONFIGURATION, TOKENIZER, TOKENIZER_CONFIGURATION), reference
            )
        return AutoTokenizer.from_pretrained(source_of(reference), **reading_of(reference))


def loaded_facts(model: PreTrainedModel, reference: ModelReference | None = None) -> ModelFacts:
    """Those that are packaged, if its reference is that of a preset or a bundled model. The work of another one is that
    of its description, where this is kept."""
    if reference and (packaged := facts_of(reference)):
        return packaged
    kept = kept_facts(reference) if reference and reference.kind != "preset" else None
    head = getattr(model.get_output_embeddings(), "weight", None)
    # A layer that was quantized in its place may hold its numbers under another name.
    found = replace(facts_of_config(model.config), tied_head=head is model.get_input_embeddings().weight)
    return replace(found, work=kept.work, uncounted=kept.uncounted) if kept else found


def facts_of_config(config: PretrainedConfig) -> ModelFacts:
    """By the names that all of transformers shares; no heads without attention, no context where positions have no
    end. Where layers differ, heads and their sizes are those of the layer that has the most of them."""
    config = config.get_text_config(decoder=True)
    family, heads = family_of(config.model_type), max(sizes_of(config, "num_attention_heads"), default=0)
    hidden, inner = config.hidden_size, family.keys.inner_size
    contexts = (getattr(config, name, None) for name in _CONTEXTS)
    kv_heads = max(sizes_of(config, "num_key_value_heads") or sizes_of(config, "num_kv_heads"), default=heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # as older configurations say it
    return ModelFacts(
        family=config.model_type,
        hidden_size=hidden,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=config.vocab_size,
        context=next((context for context in contexts if context is not None), None),
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        head_size=max(sizes_of(config, "head_dim"), default=hidden // heads) if heads else 0,
        # GPT-2's configuration may leave the width out.
        inner_size=(getattr(config, inner) or 4 * hidden) if inner else None,
        gated_mlp=bool(family.mlp and family.mlp.gate) if inner else None,
        embedding_size=getattr(config, "word_embed_proj_dim", None) or hidden,
    )


def sizes_of(config: PretrainedConfig, *names: str) -> set[int]:
    """The sizes of a configuration's layers by any of these names; transformers gives none for the whole model where
    layers differ."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    found = (getattr(layer, name, None) for name in names for layer in layers)
    return {size for size in found if isinstance(size, int) and size}


def why_no_decoder(config: PretrainedConfig) -> str | None:
    """Why a model does not go on with a text, as the end of a sentence about it; None for one that does."""
    kind, name = type(config), config.model_type
    goes_on = kind in MODEL_FOR_CAUSAL_LM_MAPPING
    if kind in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING and (config.is_encoder_decoder or not goes_on):
        return f"is a speech model ({name}); name a model that generates text from text."
    if config.is_encoder_decoder:
        return f"is an encoder-decoder ({name}); name a model that generates text with a decoder alone."
    if kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return f"is an encoder ({name}), which generates no text; name a model that does."
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not goes_on:
        return f"is a vision-language model ({name}); name a model that generates text from text alone."
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and not goes_on:
        return f"is a model of text and sound ({name}); name a model that generates text from text alone."
    if not goes_on:
        return f"is a {name} model, which generates no text; name a model that does."
    text = config.get_text_config(decoder=True)
    if absent := next((each for each in _DECODER if not hasattr(text, each)), None):
        return f"is a {name} model, which is no single decoder: its configuration has no {absent}; name one that has."
    return None


def loaded_image_facts(model: PreTrainedModel) -> ImageFacts:
    labels = {"num_labels": model.config.num_labels}
    return image_facts_from_config(model.config.model_type, model.config.to_dict() | labels)


def count_weights(model: Module) -> int:
    """Number of weights; what is tied counts once, and each 4-bit number of a packed layer."""
    plain: int = sum(parameter.numel() for parameter in model.parameters())
    return plain + count_packed(model)


def _create(
    preset: Preset, kind: Any, device: str, dtype: str, attention: str | None, seed: int
) -> PreTrainedModel:
    """Random weights in place: no tensor exists on another device or in another dtype. `kind` is an Auto class."""
    config = AutoConfig.for_model(preset.model_type, **preset.config)
    chosen = {"attn_implementation": attention} if attention else {}
    torch.manual_seed(seed)
    with torch.device(device), _weights_drawn_once():
        model: PreTrainedModel = kind.from_config(config, dtype=getattr(torch, dtype), **chosen)
    return model


@contextmanager
def _weights_drawn_once() -> Iterator[None]:
    """torch's layers draw weights that transformers overwrites; leaving them out halves the time of making a model."""
    names = ("kaiming_uniform_", "normal_", "uniform_")
    try:
        for name in names:
            setattr(init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name in names:
            setattr(init, name, TORCH_INIT_FUNCTIONS[name])


def _settle(model: PreTrainedModel) -> None:
    """Gives batch norms the mean and the variance that they see, by one pass over a few small random images."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    side = min(model.config.image_size, _SETTLING_SIDE)
    shape = (_SETTLING_IMAGES, model.config.num_channels, side, side)
    with torch.no_grad():
        model.train()(pixel_values=torch.randn(shape, dtype=model.dtype, device=model.device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _read(
    reference: ModelReference,
    kind: Any,
    device: str,
    dtype: str,
    attention: str | None,
    packed: str | None = None,
) -> PreTrainedModel:
    source, reading, file = source_of(reference), reading_of(reference), gguf_file(reference)

    def read(config: PretrainedConfig | None = None) -> PreTrainedModel:
        chosen = {"config": config, "dtype": dtype, "attn_implementation": attention}
        plain = GenerationConfig(do_sample=False)
        model = read_whole(kind, str(reference), source, **chosen, generation_config=plain, **reading)
        torch.nn.Module.to(model, device)
        return model

    with _one_sentence(reference):
        header = sound_gguf(file, reference) if file else None
        if reference.kind == "path" and not file:
            read_configuration(configuration_file(reference), reference)
        config = AutoConfig.from_pretrained(source, **reading)
        reason = why_no_decoder(config) if kind is AutoModelForCausalLM else None
        if kind is not AutoModelForCausalLM and type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            reason = f"is a {config.model_type} model, which classifies no images; name a model that does."
        if reason:
            raise UnsupportedError(f"{reference} {reason}")
        _require_attention(kind, config, attention)
        if file and header:
            restore(config, header, file)
            model = read(config)
            forget_quantizer(model)
            return model
        if reference.kind == "path":
            sound_directory(reference)
        packing = packing_of(config)
        if packing is None:
            return read()
        if packed not in (None, packing.method):
            raise UnsupportedError(
                f"{reference} was quantized by {packing.method}; use {packing.method} in the stack instead of {packed}."
            )
        model = read_packed(packing, config, read)
        if packed is None:
            widen(model)
        return model


def source_of(reference: ModelReference) -> str:
    """The source for transformers: a directory of this machine, or the name of a repository."""
    if reference.kind == "bundled":
        return str(BUNDLED[reference.name])
    file = gguf_file(reference)
    if file:
        return str(file.parent)
    return str(model_directory(reference.name)) if reference.kind == "path" else reference.name


def reading_of(reference: ModelReference) -> dict[str, Any]:
    """Never remote code, and the network for the hub alone, while it answers; which GGUF file of a directory."""
    file = gguf_file(reference)
    return ({"gguf_file": file.name} if file else {}) | {
        "revision": reference.revision or "main",
        "trust_remote_code": False,
        "local_files_only": reference.kind != "hub" or why_no_hub() is not None,
    }


@contextmanager
def _one_sentence(reference: ModelReference, files: str = CONFIGURATION) -> Iterator[None]:
    """The library's errors as one sentence with advice on `files`; errors of memory or of a device stay as they are."""
    try:
        yield
    except (OptiGPUError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):  # torch has no class for the host's
            raise
        if isinstance(error, SafetensorError) and reference.kind == "hub":
            require_sound(configuration_file(reference).parent, reference)
        no_hub = why_no_hub() if reference.kind == "hub" and isinstance(error, OSError) else None
        said = f"its files are not all in the hub's cache, and {no_hub}" if no_hub else _said(error)
        raise UnsupportedError(
            f"{reference} cannot be loaded here: {said}{_advice(reference, files)}."
        ) from error


def _said(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
    if isinstance(error, KeyError) and len(text.split()) == 1:
        return f"its configuration names {text!r}, which transformers does not know"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    # Of a field that is refused, the first line is what refuses it, and the second one the error and why.
    line = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return _KIND.sub("", line).rstrip(".!")


def _advice(reference: ModelReference, files: str) -> str:
    if reference.kind == "path" and reference.name.endswith(GGUF):
        return "; ask for the backend llama_cpp"
    if reference.kind != "hub":
        return f"; check its {files}"
    name = reference.name.rpartition("/")[2].lower()
    known = name in PRESETS or name in IMAGE_PRESETS
    preset = f"; preset:{name} has its shapes, random weights, and needs no network" if known else ""
    return f"{preset}; or put it under {MODELS_DIR} and name it path:DIR"
