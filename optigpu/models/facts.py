"""Facts about a model that are known without loading it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from optigpu.documents.shapes import ImageFacts, ModelFacts
from optigpu.models.bundled import BUNDLED, bundled_config
from optigpu.models.families import family_of
from optigpu.models.held import CONFIGURATION, model_directory
from optigpu.models.presets import IMAGE_PRESETS, PRESETS
from optigpu.models.reference import ModelReference, preset_of
from optigpu.vocabulary import UnsupportedError

Facts = ModelFacts | ImageFacts
_USUAL_SIZE = 224
"""He et al., Deep Residual Learning, 2015: the crops that ImageNet's classifiers are trained on ever since."""


def known_facts(reference: ModelReference) -> Facts | None:
    """The facts of a preset or a bundled model; None for other models."""
    if reference.kind == "preset" and reference.name in IMAGE_PRESETS:
        preset = IMAGE_PRESETS[reference.name]
        return image_facts_from_config(preset.model_type, preset.config)
    return facts_of(reference)


def facts_of(reference: ModelReference) -> ModelFacts | None:
    """As `known_facts`, of decoders alone: None for an image classifier as well."""
    if reference.kind == "bundled":
        config = bundled_config(reference.name)
        return facts_from_config(config["model_type"], config)
    preset = preset_of(reference)
    if preset is None or reference.name in IMAGE_PRESETS:
        return None
    return facts_from_config(preset.model_type, preset.config)


def config_of(reference: ModelReference) -> tuple[str, Mapping[str, Any]]:
    """The model_type and the configuration of a model: of a folder or the hub's cache as their config.json says.

    Raises UnsupportedError where that is not on this machine or cannot be read.
    """
    preset = preset_of(reference)
    if preset is not None:
        return preset.model_type, preset.config
    try:
        config: dict[str, Any] = json.loads(_config_file(reference).read_text("utf-8"))
        return str(config["model_type"]), config
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedError(
            f"The configuration of {reference} cannot be read ({type(error).__name__}); check its config.json."
        ) from error


def _config_file(reference: ModelReference) -> Path:
    if reference.kind == "bundled":
        return BUNDLED[reference.name] / CONFIGURATION
    if reference.kind == "path":
        return model_directory(reference.name) / CONFIGURATION
    from huggingface_hub import try_to_load_from_cache  # only a hub's model needs it

    found = try_to_load_from_cache(reference.name, CONFIGURATION, revision=reference.revision or "main")
    if isinstance(found, str):
        return Path(found)
    raise UnsupportedError(
        f"The hub's cache does not hold {reference}; name one of the presets {', '.join(PRESETS)}, or load the model "
        "once."
    )


def image_facts_from_config(family: str, config: Mapping[str, Any]) -> ImageFacts:
    """The facts in a transformers configuration of an image classifier, given as a mapping of its attributes.

    Of a size that is not square its longer side counts.
    """
    size = config.get("image_size") or _USUAL_SIZE
    width = config.get("depth_multiplier", 1)
    return ImageFacts(
        family=family,
        channels=int(config.get("num_channels", 3)),
        image_size=int(size if isinstance(size, int) else max(size)),
        classes=int(config["num_labels"]),
        fixed_size=family_of(family).fixed_image_size,
        alpha=None if width == 1 else f"{width:g}",
    )


def facts_from_config(family: str, config: Mapping[str, Any]) -> ModelFacts:
    """The facts in a transformers configuration, given as a mapping of its attributes."""
    keys = family_of(family).keys
    values = {**keys.defaults, **config}

    def read(name: str) -> Any:
        return values[keys.renamed.get(name, name)]

    heads, hidden_size = int(read("num_attention_heads")), int(read("hidden_size"))
    return ModelFacts(
        family=family,
        hidden_size=hidden_size,
        layers=int(read("num_hidden_layers")),
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        vocabulary=int(values["vocab_size"]),
        context=int(read("max_position_embeddings")),
        tied_head=bool(values.get("tie_word_embeddings", False)),
        **block_shapes(family, values, hidden_size, heads),
    )


class BlockShapes(TypedDict):
    """The fields of ModelFacts that say how large the matrices of a block are."""

    head_size: int
    inner_size: int | None
    gated_mlp: bool | None
    embedding_size: int


def block_shapes(family: str, config: Mapping[str, Any], hidden_size: int, heads: int) -> BlockShapes:
    """Read from a transformers configuration, given as a mapping of its attributes."""
    known = family_of(family)
    name = known.keys.inner_size
    return {
        "head_size": int(config.get("head_dim") or hidden_size // heads),
        # GPT-2's configuration may leave the width out.
        "inner_size": int(config.get(name) or 4 * hidden_size) if name else None,
        "gated_mlp": bool(known.mlp and known.mlp.gate) if name else None,
        "embedding_size": int(config.get("word_embed_proj_dim") or hidden_size),
    }
