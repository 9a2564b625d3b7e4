"""What engines that trace a transformers model do not express of its configuration.

A trace holds what the layers compute. It holds neither the mask, which such an engine gives, nor what changes with the
length of a sequence.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from optigpu.models.loading.expressed import ROTATIONS
from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

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
