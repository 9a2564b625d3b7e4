"""How far the attention of a transformers model reaches back, for engines that it is given a mask for."""

from typing import TYPE_CHECKING

from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def window_of(model: "PreTrainedModel", engine: str) -> int | None:
    """How many tokens every layer's attention reaches back; None without a bound.

    Raises UnsupportedError for a model whose layers differ in that.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    window = getattr(config, "sliding_window", None)
    if window is None or "sliding_attention" not in kinds:
        return None
    if len(kinds) > 1:
        raise UnsupportedError(
            f"{engine} does not support {config.model_type} models whose layers use different attention; ask for the "
            "backend torch."
        )
    return int(window)
