"""Which fields of a configuration a writer of another engine's models expresses, and why it refuses all others.

Every field that a writer does not list must have its class's value or be one of HARMLESS: so one that is new in
transformers is refused. A name that the class does not declare counts only where the family's code reads it. An engine
that traces a model expresses what its layers compute, but neither the mask, which such an engine gives, nor what
changes with the length of a sequence. Imports no torch.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Condition:
    """What all fields together must meet for one of them to be expressed; `words` follow "only"."""

    words: str
    holds: "Callable[[PretrainedConfig], bool]"


Values = tuple[object, ...] | Condition | None
"""What a field may be: one of these (of a list each of its items), what meets a condition, or anything."""
Fields = dict[str, Values]
"""What a writer expresses, by the names of fields; those of rope_parameters as "rope_parameters.factor"."""

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""The kinds of rotary embeddings whose angles do not depend on how long a sequence is."""
SIZES: Fields = dict.fromkeys(
    (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions",
        "n_inner", "ffn_dim", "tie_word_embeddings",
    )
)  # fmt: skip
"""What the shapes of a model's weights say as well."""
ROTATION: Fields = dict.fromkeys(
    f"rope_parameters.{name}"
    for name in (
        "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    )
) | {"rope_parameters.rope_type": ROTATIONS, "rope_parameters.partial_rotary_factor": (1.0,)}  # fmt: skip
"""What a table of angles holds that transformers' own rotary embedding is asked for."""
DECODER: Fields = (
    SIZES
    | ROTATION
    | {
        "word_embed_proj_dim": Condition(
            "hidden_size", lambda config: bool(config.word_embed_proj_dim == config.hidden_size)
        )
    }
    | dict.fromkeys(
        (
            "rms_norm_eps", "layer_norm_epsilon", "attention_bias", "mlp_bias", "enable_bias", "sliding_window",
            "layer_types", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
        )
    )
)  # fmt: skip
"""What the layers of a loaded decoder of the table's families say themselves; no activations."""
HARMLESS = frozenset(
    (
        "transformers_version", "architectures", "model_type", "_name_or_path", "dtype", "quantization_config",
        "id2label", "label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id",
        "initializer_range", "init_std", "use_cache", "output_hidden_states", "pretraining_tp",
        "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "hidden_dropout", "layerdrop",
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        "use_sliding_window", "max_window_layers", "rope_parameters.type",
    )
)  # fmt: skip
"""Fields that change no logit of a loaded model: names, token ids, first weights, dropout, what is returned beside the
logits, and what transformers has read into other fields (`sliding_window`, `layer_types`, `rope_type`)."""
_SHARED = ("masking_utils.py", "cache_utils.py", "modeling_rope_utils.py")
"""Files of transformers that read configurations of all families."""


def require_expressed(config: "PretrainedConfig", fields: Fields, writer: str) -> None:
    """Raises UnsupportedError, with the field and its value, for what a writer ("A GGUF file") does not express."""
    found = unexpressed(config, fields)
    if found:
        raise UnsupportedError(f"{writer} does not express {found}; ask for the backend torch.")


def unexpressed(config: "PretrainedConfig", fields: Fields) -> str | None:
    """The first field whose value is not expressed, with that value and those that are, or None."""
    values, declared = _values(config), _values(type(config)())
    # A condition may hold or not because of another field, so it is asked last.
    for name in sorted(values, key=lambda each: isinstance(fields.get(each), Condition)):
        value = values[name]
        if name in fields:
            allowed = fields[name]
            if not _allows(allowed, value, config):
                words = (
                    allowed.words if isinstance(allowed, Condition) else " or ".join(map(repr, allowed or ()))
                )
                return f"{name} = {value!r}, only {words}"
        elif (
            name not in HARMLESS
            and value != declared.get(name)
            and (name in declared or _is_read(config, name))
        ):
            return f"{name} = {value!r}"
    return None


def _values(config: "PretrainedConfig") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in config.to_dict().items():
        if name == "rope_parameters" and isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def _allows(allowed: Values, value: object, config: "PretrainedConfig") -> bool:
    if allowed is None:
        return True
    if isinstance(allowed, Condition):
        return allowed.holds(config)
    return all(each in allowed for each in (value if isinstance(value, list) else [value]))


def _is_read(config: "PretrainedConfig", name: str) -> bool:
    """Whether code of transformers that computes this family's models reads a field that its class does not declare."""
    own = name.partition(".")[2] or name
    reading = re.compile(rf"config\.{re.escape(own)}\b|[\"']{re.escape(own)}[\"']")
    package = Path(str(sys.modules["transformers"].__file__)).parent
    family = Path(str(sys.modules[type(config).__module__].__file__)).parent
    code = (*(package / shared for shared in _SHARED), *family.glob("modeling_*.py"))
    return any(reading.search(path.read_text("utf-8")) for path in code)


SAME = 1e-3
"""The largest difference of a logit over the largest logit that float32 may leave, and more."""
_ROTATIONS = (*ROTATIONS, "proportional")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MASKS = {"is_causal": (None, True), "use_bidirectional_attention": (None, False)}
"""Fields of a decoder's mask, and the values with which each token sees all before it."""


def require_traceable(config: "PretrainedConfig", engine: str) -> None:
    """Raises UnsupportedError, naming the field, for angles that change with the length and sizes with the layer."""
    values = config.to_dict()
    if layers := values.get("per_layer_config"):
        raise _refused(engine, f"per_layer_config = {layers!r}")
    for kind in _rotations(values.get("rope_parameters")):
        if kind not in _ROTATIONS:
            raise _refused(engine, f"rope_type = {kind!r}, only {' or '.join(map(repr, _ROTATIONS))}")


def window_of(model: "PreTrainedModel", engine: str) -> int | None:
    """How many tokens every layer's attention reaches back; None without a bound.

    Raises UnsupportedError as `require_traceable`, and for a mask that is another or differs from layer to layer.
    """
    config = model.config.get_text_config(decoder=True)
    require_traceable(config, engine)
    for name, usual in _MASKS.items():
        if (value := getattr(config, name, None)) not in usual:
            raise _refused(engine, f"{name} = {value!r}")
    kinds = set(getattr(config, "layer_types", None) or [_SLIDING])
    window = getattr(config, "sliding_window", None)
    different = _refused(engine, f"layers of different attention (layer_types = {sorted(kinds)})")
    if kinds - {_FULL, _SLIDING}:
        raise different
    if window is None or _SLIDING not in kinds:
        return None
    if not hasattr(type(config)(), "sliding_window"):  # the layers have none, though transformers' cache has
        raise _refused(engine, f"sliding_window = {window!r} of {config.model_type} models")
    if len(kinds) > 1:
        raise different
    return int(window)


def require_same(
    found: "torch.Tensor", expected: "torch.Tensor", model: "PreTrainedModel", engine: str
) -> None:
    """Raises UnsupportedError for logits of a trace that are not the model's: it computes what its tokens decide."""
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= SAME:
        kind = model.config.model_type
        raise UnsupportedError(
            f"{engine} does not support {kind} models: traced, this one's logits differ by {difference:.2g} of the "
            "largest; ask for the backend torch."
        )


def _rotations(parameters: object) -> Iterator[str]:
    """The kinds of rotary embeddings, of which each kind of layer may have its own."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters["rope_type"]
        for inner in parameters.values():
            yield from _rotations(inner)


def _refused(engine: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"{engine} does not express {what}; ask for the backend torch.")
