"""Whether a model computes the same in another way, as a technique that rounds nothing promises."""

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from optigpu.models.loading.packed_checkpoints import count_packed
from optigpu.techniques.base import EXACT
from optigpu.vocabulary import UnsupportedError

TEXT, STEPS = 8, 3
"""Tokens of the text that is computed in both ways, and the tokens that follow it one by one."""
ROUNDINGS = 64
"""Logits in 16 bits may differ by as many roundings of the largest."""


def decoded(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """Logits after a short text and each of a few tokens, float32 [STEPS + 1, vocabulary], through an empty cache."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, TEXT + STEPS + 1, device=model.device)[None] % vocabulary
    parts = [ids[:, :TEXT], *ids[:, TEXT:].split(1, dim=1)]
    with torch.no_grad():
        found = [model(input_ids=part, past_key_values=cache, use_cache=True).logits[0, -1] for part in parts]
    return torch.stack(found).float()


def require_same_attention(technique: str, model: PreTrainedModel) -> None:
    """Raises UnsupportedError if a decoder's attention computes something else than transformers' fused one does.

    A model without a fused one has nothing to be compared with, and packed layers compute nothing yet.
    """
    if not (model.can_generate() and model._supports_sdpa) or count_packed(model):
        return
    own = model.config._attn_implementation
    found = decoded(model, DynamicCache(config=model.config))
    model.config._attn_implementation = "sdpa"
    wanted = decoded(model, DynamicCache(config=model.config))
    model.config._attn_implementation = own
    require_same(technique, model, wanted, found)


def require_same(technique: str, model: PreTrainedModel, wanted: torch.Tensor, found: torch.Tensor) -> None:
    """Raises UnsupportedError if logits differ by more than another order of sums explains."""
    bound = max(EXACT, ROUNDINGS * torch.finfo(model.dtype).eps) * float(wanted.abs().max())
    difference = float((found - wanted).abs().max())
    if not difference <= bound:
        raise UnsupportedError(
            f"{technique} would change what this {model.config.model_type} model computes: a logit by "
            f"{difference:.2g}, where rounding explains {bound:.1g}; leave it out of the stack."
        )
