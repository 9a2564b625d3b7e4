"""The numbers of a GGUF file: what a configuration of transformers says, under llama.cpp's keys."""

from typing import Any

from transformers import PretrainedConfig

from optigpu.backends.llama_cpp.gguf_families import WrittenFamily, written_family
from optigpu.models.loading.expressed import require_expressed
from optigpu.models.loading.gguf_file import llama3_divisors
from optigpu.models.loading.load import facts_of_config
from optigpu.vocabulary import UnsupportedError

Value = int | float | bool | str | list[bool]
Metadata = dict[str, Value]
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_PLAIN = ("default", None)
_WHOLE = ("_count", "_length")
"""How keys of whole numbers end; a configuration may have a whole number where a file has none."""


def metadata(config: PretrainedConfig, inner_size: int) -> Metadata:
    """The values that a GGUF file holds beside its tensors, under llama.cpp's keys; `inner_size` is that of the MLP.

    Raises UnsupportedError for a family that is not written, and a field of the configuration that is not expressed.
    """
    family, facts = written_family(config.model_type), facts_of_config(config)
    require_expressed(config, family.fields, "A GGUF file")
    epsilon = family.epsilon if isinstance(family.epsilon, float) else float(getattr(config, family.epsilon))
    found: Metadata = {
        "context_length": facts.longest,
        "embedding_length": facts.hidden_size,
        "block_count": facts.layers,
        "feed_forward_length": inner_size,
        "attention.head_count": facts.heads,
        "attention.head_count_kv": facts.kv_heads,
        "attention.key_length": facts.head_size,
        "attention.value_length": facts.head_size,
        family.norm: epsilon,
        "vocab_size": facts.vocabulary,
    }
    for key, field in family.numbers.items():
        value = getattr(config, field)
        if value is not None:
            found[key] = value if isinstance(value, bool) or key.endswith(_WHOLE) else float(value)
    found |= _windows(config, family, facts.longest) | _rotation(config, facts.head_size)
    return {f"{family.architecture}.{key}": value for key, value in found.items()}


def rope_factors(config: PretrainedConfig) -> list[float] | None:
    """What llama.cpp divides each pair's frequency by for Llama 3's scaling, [head size / 2]; None without it."""
    rope = _rope(config)
    if rope is None or rope.get("rope_type") != "llama3":
        return None
    return llama3_divisors(rope, facts_of_config(config).head_size // 2)


def _windows(config: PretrainedConfig, family: WrittenFamily, context: int) -> Metadata:
    """Which layers have windows; where the architecture has none, a context that no window cuts."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    windowed = [each == _WINDOWED for each in layers] if layers else []
    if not window or (layers and not any(windowed)):
        return {}
    if not family.windows:
        return {"context_length": min(context, window)}
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed}


def _rope(config: PretrainedConfig, kind: str = _FULL) -> dict[str, Any] | None:
    """How a kind of layers rotates; None for a model without rotary embeddings."""
    known = config.to_dict().get("rope_parameters")
    if not known:
        return None
    return dict(known.get(kind, known))


def _rotation(config: PretrainedConfig, head_size: int) -> Metadata:
    rope, windowed = _rope(config), _rope(config, _WINDOWED)
    if rope is None or windowed is None:
        return {}
    found: Metadata = {
        "rope.dimension_count": int(head_size * (rope.get("partial_rotary_factor") or 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if windowed != rope:
        if windowed.get("rope_type") not in _PLAIN:
            raise UnsupportedError(
                f"A GGUF file does not express rope_type = {windowed['rope_type']!r} of layers with sliding windows; "
                "ask for the backend torch."
            )
        found["rope.freq_base_swa"] = float(windowed["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if rope.get(ours) is not None:
                found[f"rope.scaling.{theirs}"] = float(rope[ours])
    elif rope["rope_type"] not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"A GGUF file does not express rope_type = {rope['rope_type']!r}; ask for the backend torch."
        )
    return found
