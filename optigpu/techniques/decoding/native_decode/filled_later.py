"""A cache that transformers' `generate` returns, of a text that a native decoder wrote in a cache of its own."""

import torch
from transformers import DynamicCache, PreTrainedModel

from optigpu.techniques.decoding.native_decode.unpacking import unpack


class FilledLater(DynamicCache):
    """Has the keys and values of a text once something reads them: the model itself runs over the text then.

    Most callers that ask for scores never read the cache.
    """

    def __init__(self, model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        """tokens: int64 [batch, length]; mask: int64 [batch, length of the prompts] where these have padding."""
        super().__init__(config=model.config)
        del self.layers

        def fill() -> DynamicCache:
            return _filled(model, tokens, mask)

        self._fill = fill  # a function, so that a copy of the cache has the same model

    def __getattr__(self, name: str) -> object:
        """Only for what is missing."""
        if name != "layers":
            raise AttributeError(f"{type(self).__name__} has no attribute {name}.")
        self.layers = self._fill().layers
        return self.layers


@torch.no_grad()
def _filled(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor | None) -> DynamicCache:
    unpack(model)
    inputs: dict[str, torch.Tensor] = {}
    if mask is not None:
        more = mask.new_ones(mask.shape[0], tokens.shape[1] - mask.shape[1])
        whole = torch.cat([mask, more], dim=1).to(model.device)
        inputs = {"attention_mask": whole, "position_ids": (whole.long().cumsum(dim=1) - 1).clamp(min=0)}
    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=tokens.to(model.device), past_key_values=cache, use_cache=True, **inputs)
    return cache
