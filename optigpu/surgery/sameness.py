"""Whether a model computes the same in another way, as a technique that rounds nothing promises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from optigpu.models.loading.checkpoint import count_packed
from optigpu.models.loading.load import sizes_of
from optigpu.techniques.base import EXACT
from optigpu.vocabulary import UnsupportedError, first_line

TEXT, STEPS = 8, 3
"""Tokens of the text that is computed in both ways, and the tokens that follow it one by one."""
LONGEST = 1024
"""A window of more tokens is not passed: it is the same code as a small one's, and a pass over it takes long."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
"""What configurations call the tokens that attention reaches back."""
ROUNDINGS = 64
"""Logits in 16 bits may differ by as many roundings of the largest."""


@contextmanager
def told(sentence: Callable[[str], str]) -> Iterator[None]:
    """Raises UnsupportedError(sentence(why)) for an error of a model's own code; those of memory or of a device
    stay."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):  # torch has no class for the host's
            raise
        raise UnsupportedError(sentence(first_line(error))) from error


def decoded(model: PreTrainedModel, new_cache: Callable[[int], Cache]) -> torch.Tensor:
    """Logits after texts and each of a few tokens, float32 [texts * (STEPS + 1), vocabulary], through caches.

    `new_cache` makes an empty one, for at least as many tokens as it is told. Where attention has a window, one text
    ends just before it is full, so that a step passes it, and one behind, if the model's positions allow it.
    """
    config = model.config.get_text_config(decoder=True)
    short = [window for window in windows_of(model) if window <= LONGEST]
    lengths = {length for window in short for length in (window - 1, window + 1)}
    most = (getattr(config, "max_position_embeddings", None) or LONGEST + TEXT) - STEPS
    texts = [TEXT, *(length for length in sorted(lengths) if 0 < length <= most)]
    return torch.cat([_decoded(model, new_cache(text + STEPS), text) for text in texts])


def _computed(model: PreTrainedModel) -> torch.Tensor:
    """`decoded` with caches that grow; the logits of a text in one pass where a model takes none of transformers'."""
    try:
        with told(str):
            return decoded(model, lambda _: DynamicCache(config=model.config))
    except UnsupportedError:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=_ids(model, TEXT), use_cache=False).logits[0]
        return found.float()


def windows_of(model: PreTrainedModel) -> list[int]:
    """How many tokens layers reach back, as far as the configuration says."""
    return sorted(sizes_of(model.config.get_text_config(decoder=True), *_WINDOWS))


def _decoded(model: PreTrainedModel, cache: Cache, text: int) -> torch.Tensor:
    ids = _ids(model, text + STEPS)
    parts = [ids[:, :text], *ids[:, text:].split(1, dim=1)]
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    with torch.no_grad():
        found = [
            model(input_ids=part, past_key_values=cache, use_cache=True, **last).logits[0, -1]
            for part in parts
        ]
    return torch.stack(found).float()


def _ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids: torch.Tensor = torch.arange(1, count + 1, device=model.device)[None] % vocabulary
    return ids


def require_same_attention(technique: str, model: PreTrainedModel) -> None:
    """Raises UnsupportedError if attention computes otherwise than transformers' fused one, where there is one and no
    packed layer."""
    if not (model.can_generate() and model._supports_sdpa) or count_packed(model):
        return
    own = model.config._attn_implementation
    found = _computed(model)
    model.config._attn_implementation = "sdpa"
    wanted = _computed(model)
    model.config._attn_implementation = own
    require_same(technique, model, wanted, found)


def rounding_of(model: PreTrainedModel, logits: torch.Tensor) -> float:
    """By how much a model's logits may differ for another order of sums."""
    return max(EXACT, ROUNDINGS * torch.finfo(model.dtype).eps) * float(logits.abs().max())


def require_same(technique: str, model: PreTrainedModel, wanted: torch.Tensor, found: torch.Tensor) -> None:
    """Raises UnsupportedError if logits differ by more than another order of sums explains.

    Of a model whose own are NaN or infinite the check of what it generates says so.
    """
    if not bool(wanted.isfinite().all()):
        return
    bound = rounding_of(model, wanted)
    difference = float((found - wanted).abs().max())
    if not difference <= bound:
        raise UnsupportedError(
            f"{technique} would change what this {model.config.model_type} model computes: a logit by "
            f"{difference:.2g}, where rounding explains {bound:.1g}; leave it out of the stack."
        )
