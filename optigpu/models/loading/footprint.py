"""What a step reads of a loaded model: all of its weights but the rows of a table that are looked up."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from optigpu.documents.shapes import Footprint, ImageFacts, ImageFootprint, ModelFacts


def image_footprint_of(model: Any, facts: ImageFacts, shape: Sequence[int]) -> ImageFootprint:
    """The footprint of an image classifier after the stack has changed it.

    `shape` is that of an image, [channels, height, width]. Operations are counted by torch over a model of the same
    configuration that has shapes and no numbers.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForImageClassification

    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        # Attention in separate products: the counter does not know every fused kernel.
        plain = AutoModelForImageClassification.from_config(model.config, attn_implementation="eager")
        plain.eval()(pixel_values=torch.empty(1, *shape))
    weights = _storages([*model.parameters(), *model.buffers()])
    return ImageFootprint(facts, sum(weights.values()), counter.get_total_flops(), math.prod(shape))


def footprint_of(model: Any, facts: ModelFacts) -> Footprint:
    """The footprint of a transformers decoder after the stack has changed it; `facts` are those from before."""
    from torch.nn import Embedding

    tables = {module for module in model.modules() if isinstance(module, Embedding)}
    tables.add(model.get_input_embeddings())
    others = (module for module in model.modules() if module not in tables)
    streamed = _storages(tensor for module in others for tensor in _tensors(module))
    rows = [tensor for table in tables for tensor in _tensors(table) if _address(tensor) not in streamed]
    return Footprint(
        facts=facts,
        streamed_bytes=sum(streamed.values()),
        row_bytes=sum(tensor.nbytes // max(1, tensor.shape[0]) for tensor in rows),
    )


def _tensors(module: Any) -> list[Any]:
    """A module's own parameters and buffers, without those of its children."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of each storage by its address; what is shared is there once."""
    return {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
