"""A decoder with its key-value cache inside, as a program for ExecuTorch has it."""

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache


class Cached(torch.nn.Module):
    """Ids [rows, tokens] and their positions [tokens] to the logits after the last, [rows, 1, vocabulary].

    The cache's tensors are buffers, and are given to its layers in each pass: torch.export would otherwise see each of
    them twice, as a buffer and as a constant.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        super().__init__()
        model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static")
        self.inner = TorchExportableModuleWithStaticCache(model, batch_size=rows, max_cache_len=length)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Writes keys and values at `positions`, which follow each other."""
        cache = self.inner.static_cache
        for index, layer in enumerate(cache.layers):
            assert isinstance(layer, StaticLayer)  # what the exportable module makes of every other kind
            layer.keys = self.inner.get_buffer(f"key_cache_{index}")
            layer.values = self.inner.get_buffer(f"value_cache_{index}")
            layer.cumulative_length = self.inner.get_buffer(f"cumulative_length_{index}")
            layer.cumulative_length.copy_(positions[0])
        found: Tensor = self.inner.model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return found
